// A moving average of width 3: every input is read three times.
extern "C" __global__ void convolve(const float* input, float* output, int N) {
    int index = blockIdx.x * blockDim.x + threadIdx.x;
    float sum = 0.0f;
    #pragma unroll
    for (int i = 0; i < 3; ++i) {
        sum += input[index + i];
    }
    output[index] = sum / 3.0f;
}
