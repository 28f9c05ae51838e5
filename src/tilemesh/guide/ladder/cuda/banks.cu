// A warp reads shared memory with a distance of STRIDE words between neighbouring threads, TURNS times.
extern "C" __global__ void banks(const float* input, float* output, int N) {
    __shared__ float words[32 * STRIDE];
    for (int i = 0; i < STRIDE; ++i) {
        words[i * 32 + threadIdx.x % 32] = input[i * 32 + threadIdx.x % 32];
    }
    __syncthreads();
    float sum = 0.0f;
    for (int i = 0; i < TURNS; ++i) {
        sum += words[(threadIdx.x * STRIDE + i) % (32 * STRIDE)];
    }
    output[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
