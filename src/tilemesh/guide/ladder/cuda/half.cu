// Lower precision: float16 operands, float32 sums. Half the bytes, twice the products of an instruction (16 x 8 x 16).
// Tiles come by asynchronous copies, STAGES of them in flight, and fragments by ldmatrix.
constexpr int WARPS_ACROSS = LN / WN;
constexpr int THREADS = LM / WM * WARPS_ACROSS * 32;
constexpr int WIDE_A = S + 8;   // rows padded by 16 bytes: ldmatrix then asks no bank twice
constexpr int WIDE_B = LN + 8;
constexpr int TILE_A = LM * WIDE_A;
constexpr int TILE = TILE_A + S * WIDE_B;

__device__ __forceinline__ void fetch(const half_bits* A, const half_bits* B, half_bits* ring, int N, int tile) {
    int thread = threadIdx.x;
    int row = blockIdx.y * LM, column = blockIdx.x * LN;
    int stage = tile % STAGES * TILE;
    #pragma unroll
    for (int i = 0; i < LM * S / 8 / THREADS; ++i) {
        int element = (i * THREADS + thread) * 8;
        copy_async(&ring[stage + element / S * WIDE_A + element % S], &A[(row + element / S) * N + tile * S + element % S]);
    }
    #pragma unroll
    for (int i = 0; i < LN * S / 8 / THREADS; ++i) {
        int element = (i * THREADS + thread) * 8;
        copy_async(&ring[stage + TILE_A + element / LN * WIDE_B + element % LN],
                   &B[(tile * S + element / LN) * N + column + element % LN]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) matmul(const half_bits* A, const half_bits* B, half_bits* C, int N) {
    extern __shared__ __align__(16) half_bits ring[];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int warp_row = warp / WARPS_ACROSS * WM, warp_column = warp % WARPS_ACROSS * WN;
    int tiles = N / S;
    float c[WM / 16][WN / 8][4] = {};
    unsigned a[WM / 16][4], b[WN / 16][4];
    for (int tile = 0; tile < STAGES - 1; ++tile) {
        if (tile < tiles) {
            fetch(A, B, ring, N, tile);
        }
        commit_copies();
    }
    for (int tile = 0; tile < tiles; ++tile) {
        wait_copies(STAGES - 2);  // this thread's part of the tile is there
        __syncthreads();          // and everybody's; and the stage before has been read by all
        if (tile + STAGES - 1 < tiles) {
            fetch(A, B, ring, N, tile + STAGES - 1);
        }
        commit_copies();
        int stage = tile % STAGES * TILE;
        #pragma unroll
        for (int k = 0; k < S; k += 16) {
            #pragma unroll
            for (int x = 0; x < WM / 16; ++x) {
                load_matrices(a[x], &ring[stage + (warp_row + x * 16 + lane % 16) * WIDE_A + k + lane / 16 * 8]);
            }
            #pragma unroll
            for (int y = 0; y < WN / 16; ++y) {
                load_matrices_turned(b[y], &ring[stage + TILE_A + (k + lane % 16) * WIDE_B + warp_column + y * 16 + lane / 16 * 8]);
            }
            #pragma unroll
            for (int x = 0; x < WM / 16; ++x) {
                #pragma unroll
                for (int y = 0; y < WN / 8; ++y) {
                    mma_f16(c[x][y], a[x], &b[y / 2][y % 2 * 2]);
                }
            }
        }
    }
    wait_copies(0);
    int row = blockIdx.y * LM + warp_row + lane / 4;
    int column = blockIdx.x * LN + warp_column + lane % 4 * 2;
    #pragma unroll
    for (int x = 0; x < WM / 16; ++x) {
        #pragma unroll
        for (int y = 0; y < WN / 8; ++y) {
            #pragma unroll
            for (int h = 0; h < 2; ++h) {
                reinterpret_cast<unsigned*>(&C[(row + x * 16 + h * 8) * N + column + y * 8])[0] =
                    pack_halves(c[x][y][h * 2], c[x][y][h * 2 + 1]);
            }
        }
    }
}
