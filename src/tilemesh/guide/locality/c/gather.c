// The sum of elements in an order that no hardware prefetcher guesses; with AHEAD > 0 the program asks for them beforehand.
float gather(const float* values, const int* order, long n, long ahead) {
    float sum = 0.0f;
    for (long i = 0; i < n; ++i) {
        if (ahead && i + ahead < n) {
            __builtin_prefetch(&values[order[i + ahead]]);
        }
        sum += values[order[i]];
    }
    return sum;
}

// The same along a chain: each address is known only when the element before has arrived.
long chase(const int* next, long steps) {
    long at = 0;
    for (long i = 0; i < steps; ++i) {
        at = next[at];
    }
    return at;
}
