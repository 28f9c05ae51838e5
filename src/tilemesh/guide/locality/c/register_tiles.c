// C = A B with a tile of V1 x V2 sums in registers: an element of A serves V2 columns, one of B serves V1 rows.
void register_tiles(const float* A, const float* B, float* C) {
    for (int i = 0; i < N; i += V1) {
        for (int j = 0; j < N; j += V2) {
            float c[V1][V2] = {};
            for (int k = 0; k < N; ++k) {
                float a[V1], b[V2];
                for (int x = 0; x < V1; ++x) {
                    a[x] = A[(i + x) * N + k];
                }
                for (int y = 0; y < V2; ++y) {
                    b[y] = B[k * N + j + y];
                }
                for (int x = 0; x < V1; ++x) {
                    for (int y = 0; y < V2; ++y) {
                        c[x][y] += a[x] * b[y];
                    }
                }
            }
            for (int x = 0; x < V1; ++x) {
                for (int y = 0; y < V2; ++y) {
                    C[(i + x) * N + j + y] = c[x][y];
                }
            }
        }
    }
}
