// What threads do to each other's caches. Each function is called from several threads at once, without Python's lock.
void count_up(volatile long* counter, long n) {
    for (long i = 0; i < n; ++i) {
        *counter += 1;
    }
}

// Reads an array of `length` elements `times` times.
float sweep(const float* values, long length, long times) {
    float sum = 0.0f;
    for (long t = 0; t < times; ++t) {
        for (long i = 0; i < length; i += 16) {
            sum += values[i] * (float)(t + 1);
        }
    }
    return sum;
}

// Arithmetic alone: no memory but registers.
float work(float x, long n) {
    for (long i = 0; i < n; ++i) {
        x = x * 0.999999f + 0.5f;
    }
    return x;
}
