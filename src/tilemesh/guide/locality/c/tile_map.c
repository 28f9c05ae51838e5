// C += A B, where a tile of tk x tj elements of B is used by all rows of A before the next: it should stay in a cache.
void tile_map(const float* A, const float* B, float* C, int tk, int tj) {
    for (int jj = 0; jj < N; jj += tj) {
        for (int kk = 0; kk < N; kk += tk) {
            for (int i = 0; i < N; ++i) {
                for (int k = kk; k < kk + tk; ++k) {
                    float a = A[i * N + k];
                    for (int j = jj; j < jj + tj; ++j) {
                        C[i * N + j] += a * B[k * N + j];
                    }
                }
            }
        }
    }
}
