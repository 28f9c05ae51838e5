// E = D + (A + B) C, once as three loops through memory and once as one.
void three_loops(const float* A, const float* B, const float* C, const float* D, float* E, float* T, float* U) {
    for (int i = 0; i < N; ++i) {
        T[i] = A[i] + B[i];
    }
    for (int i = 0; i < N; ++i) {
        U[i] = T[i] * C[i];
    }
    for (int i = 0; i < N; ++i) {
        E[i] = U[i] + D[i];
    }
}

void fused(const float* A, const float* B, const float* C, const float* D, float* E, float* T, float* U) {
    for (int i = 0; i < N; ++i) {
        E[i] = D[i] + (A[i] + B[i]) * C[i];
    }
}
