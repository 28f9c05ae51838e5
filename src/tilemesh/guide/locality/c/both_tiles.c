// C = A B with tiles for the L1 (B1 rows of A, B2 columns of B, laid out as they are read) and in them tiles of V1 x V2 registers.
void both_tiles(const float* A, const float* B, float* C) {
    __shared__ float a[B1 * N];  // [B1 / V1][N][V1]
    __shared__ float b[B2 * N];  // [B2 / V2][N][V2]
    for (int i = 0; i < N; i += B1) {
        for (int x = 0; x < B1; ++x) {
            for (int k = 0; k < N; ++k) {
                a[(x / V1 * N + k) * V1 + x % V1] = A[(i + x) * N + k];
            }
        }
        for (int j = 0; j < N; j += B2) {
            for (int k = 0; k < N; ++k) {
                for (int y = 0; y < B2; ++y) {
                    b[(y / V2 * N + k) * V2 + y % V2] = B[k * N + j + y];
                }
            }
            for (int x = 0; x < B1 / V1; ++x) {
                for (int y = 0; y < B2 / V2; ++y) {
                    float c[V1][V2] = {};
                    for (int k = 0; k < N; ++k) {
                        float ar[V1], br[V2];
                        for (int u = 0; u < V1; ++u) {
                            ar[u] = a[(x * N + k) * V1 + u];
                        }
                        for (int v = 0; v < V2; ++v) {
                            br[v] = b[(y * N + k) * V2 + v];
                        }
                        for (int u = 0; u < V1; ++u) {
                            for (int v = 0; v < V2; ++v) {
                                c[u][v] += ar[u] * br[v];
                            }
                        }
                    }
                    for (int u = 0; u < V1; ++u) {
                        for (int v = 0; v < V2; ++v) {
                            C[(i + x * V1 + u) * N + j + y * V2 + v] = c[u][v];
                        }
                    }
                }
            }
        }
    }
}
