// Two orders of the same three loops. C is zero before.
void ijk(const float* A, const float* B, float* C) {
    for (int i = 0; i < N; ++i) {
        for (int j = 0; j < N; ++j) {
            float sum = 0.0f;
            for (int k = 0; k < N; ++k) {
                sum += A[i * N + k] * B[k * N + j];  // down a column of B: a new line at every step
            }
            C[i * N + j] = sum;
        }
    }
}

void ikj(const float* A, const float* B, float* C) {
    for (int i = 0; i < N; ++i) {
        for (int k = 0; k < N; ++k) {
            float a = A[i * N + k];
            for (int j = 0; j < N; ++j) {
                C[i * N + j] += a * B[k * N + j];  // along a row of B and a row of C
            }
        }
    }
}
