// PATHS different loops, chosen by the thread's index divided by RUN: within a warp where RUN is below 32.
extern "C" __global__ void diverge(const float* input, float* output, int N) {
    int index = blockIdx.x * blockDim.x + threadIdx.x;
    int path = threadIdx.x / RUN % PATHS;
    float value = input[index];
    for (int choice = 0; choice < PATHS; ++choice) {
        if (path == choice) {
            for (int i = 0; i < STEPS; ++i) {
                value = value * 0.5f + choice;
            }
        }
    }
    output[index] = value;
}
