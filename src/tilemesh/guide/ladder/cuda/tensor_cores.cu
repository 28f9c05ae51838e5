// As before, with the products done by tensor cores: float32 rounded to tf32, 16 x 8 x 8 products of a whole warp (mma.sync).
constexpr int WARPS_ACROSS = L / WN;
constexpr int THREADS = L / WM * WARPS_ACROSS * 32;
constexpr int FETCHES = L * S / 4 / THREADS;

// Four elements, rounded to tf32, into shared memory.
__device__ __forceinline__ void put_tf32(unsigned* shared, float4 quad) {
    uint4 bits;
    bits.x = tf32_of(quad.x);
    bits.y = tf32_of(quad.y);
    bits.z = tf32_of(quad.z);
    bits.w = tf32_of(quad.w);
    reinterpret_cast<uint4*>(shared)[0] = bits;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) matmul(const float* A, const float* B, float* C, int N) {
    __shared__ __align__(16) unsigned sA[2][L][S + 4];
    __shared__ __align__(16) unsigned sB[2][S][L + 8];
    int thread = threadIdx.x;
    int warp = thread / 32, group = thread % 32 / 4, within = thread % 4;
    int warp_row = warp / WARPS_ACROSS * WM, warp_column = warp % WARPS_ACROSS * WN;
    int row = blockIdx.y * L, column = blockIdx.x * L;
    float c[WM / 16][WN / 8][4] = {};
    unsigned a[WM / 16][4], b[WN / 8][2];
    float4 nextA[FETCHES], nextB[FETCHES];
    #pragma unroll
    for (int i = 0; i < FETCHES; ++i) {
        int element = (i * THREADS + thread) * 4;
        nextA[i] = reinterpret_cast<const float4*>(&A[(row + element / S) * N + element % S])[0];
        nextB[i] = reinterpret_cast<const float4*>(&B[element / L * N + column + element % L])[0];
        put_tf32(&sA[0][element / S][element % S], nextA[i]);
        put_tf32(&sB[0][element / L][element % L], nextB[i]);
    }
    __syncthreads();
    for (int ko = 0; ko < N; ko += S) {
        int now = ko / S % 2;
        if (ko + S < N) {
            #pragma unroll
            for (int i = 0; i < FETCHES; ++i) {
                int element = (i * THREADS + thread) * 4;
                nextA[i] = reinterpret_cast<const float4*>(&A[(row + element / S) * N + ko + S + element % S])[0];
                nextB[i] = reinterpret_cast<const float4*>(&B[(ko + S + element / L) * N + column + element % L])[0];
            }
        }
        #pragma unroll
        for (int k = 0; k < S; k += 8) {
            #pragma unroll
            for (int h = 0; h < 4; ++h) {
                #pragma unroll
                for (int x = 0; x < WM / 16; ++x) {
                    a[x][h] = sA[now][warp_row + x * 16 + group + h % 2 * 8][k + within + h / 2 * 4];
                }
            }
            #pragma unroll
            for (int h = 0; h < 2; ++h) {
                #pragma unroll
                for (int y = 0; y < WN / 8; ++y) {
                    b[y][h] = sB[now][k + within + h * 4][warp_column + y * 8 + group];
                }
            }
            #pragma unroll
            for (int x = 0; x < WM / 16; ++x) {
                #pragma unroll
                for (int y = 0; y < WN / 8; ++y) {
                    mma_tf32(c[x][y], a[x], b[y]);
                }
            }
        }
        if (ko + S < N) {
            #pragma unroll
            for (int i = 0; i < FETCHES; ++i) {
                int element = (i * THREADS + thread) * 4;
                put_tf32(&sA[1 - now][element / S][element % S], nextA[i]);
                put_tf32(&sB[1 - now][element / L][element % L], nextB[i]);
            }
        }
        __syncthreads();
    }
    #pragma unroll
    for (int x = 0; x < WM / 16; ++x) {
        #pragma unroll
        for (int y = 0; y < WN / 8; ++y) {
            #pragma unroll
            for (int h = 0; h < 4; ++h) {
                int down = warp_row + x * 16 + group + h / 2 * 8;
                C[(row + down) * N + column + warp_column + y * 8 + within * 2 + h % 2] = c[x][y][h];
            }
        }
    }
}
