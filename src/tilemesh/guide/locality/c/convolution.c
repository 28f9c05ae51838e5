// A 3 x 3 convolution of an image of (H + 2) x (W + 2) elements. `tiled` brings a tile with its border to a small buffer first.
void plain(const float* image, const float* weights, float* out) {
    for (int i = 0; i < H; ++i) {
        for (int j = 0; j < W; ++j) {
            float sum = 0.0f;
            for (int y = 0; y < 3; ++y) {
                for (int x = 0; x < 3; ++x) {
                    sum += image[(i + y) * (W + 2) + j + x] * weights[y * 3 + x];
                }
            }
            out[i * W + j] = sum;
        }
    }
}

void tiled(const float* image, const float* weights, float* out) {
    __shared__ float tile[(T + 2) * (T + 2)];
    float w[9];
    for (int x = 0; x < 9; ++x) {
        w[x] = weights[x];
    }
    for (int i = 0; i < H; i += T) {
        for (int j = 0; j < W; j += T) {
            for (int y = 0; y < T + 2; ++y) {
                for (int x = 0; x < T + 2; ++x) {
                    tile[y * (T + 2) + x] = image[(i + y) * (W + 2) + j + x];
                }
            }
            for (int u = 0; u < T; ++u) {
                for (int v = 0; v < T; ++v) {
                    float sum = 0.0f;
                    for (int y = 0; y < 3; ++y) {
                        for (int x = 0; x < 3; ++x) {
                            sum += tile[(u + y) * (T + 2) + v + x] * w[y * 3 + x];
                        }
                    }
                    out[(i + u) * W + j + v] = sum;
                }
            }
        }
    }
}
