// One element of C per thread: a row of A and a column of B are read for each.
extern "C" __global__ void matmul(const float* A, const float* B, float* C, int N) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    int column = blockIdx.y * blockDim.y + threadIdx.y;
    float sum = 0.0f;
    for (int k = 0; k < N; ++k) {
        sum += A[row * N + k] * B[k * N + column];
    }
    C[row * N + column] = sum;
}
