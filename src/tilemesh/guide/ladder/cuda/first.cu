// The first kernel: C = A + 2 B, one thread for each element.
__device__ float doubleValue(float x) {
    return 2.0f * x;
}

extern "C" __global__ void matrixAddDoubleB(const float* A, const float* B, float* C, int width, int height) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    int j = blockIdx.y * blockDim.y + threadIdx.y;
    if (i < width && j < height) {
        C[j * width + i] = A[j * width + i] + doubleValue(B[j * width + i]);
    }
}
