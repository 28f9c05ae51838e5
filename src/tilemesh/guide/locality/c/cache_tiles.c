// C = A Bt^T with tiles for the L1: B1 rows of A and B2 rows of Bt (columns of B) are brought there and used as often as they can.
void cache_tiles(const float* A, const float* Bt, float* C) {
    __shared__ float a[B1 * N];
    __shared__ float b[B2 * N];
    for (int i = 0; i < N; i += B1) {
        for (int x = 0; x < B1 * N; ++x) {
            a[x] = A[i * N + x];
        }
        for (int j = 0; j < N; j += B2) {
            for (int x = 0; x < B2 * N; ++x) {
                b[x] = Bt[j * N + x];
            }
            for (int x = 0; x < B1; ++x) {
                for (int y = 0; y < B2; ++y) {
                    float sum = 0.0f;
                    for (int k = 0; k < N; ++k) {
                        sum += a[x * N + k] * b[y * N + k];
                    }
                    C[(i + x) * N + j + y] = sum;
                }
            }
        }
    }
}
