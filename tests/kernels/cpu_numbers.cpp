// What vectors.h and codes.h make of memory and back, 16 numbers at a time, to be called from a test.

#include "codes.h"

template <class Number>
static void read(const void* at, float* out, int64_t count) {
    for (int64_t k = 0; k < count; k += LANES) store(out + k, load(static_cast<const Number*>(at) + k));
}

extern "C" void read_bfloat16(const void* at, float* out, int64_t count) { read<BFloat16>(at, out, count); }
extern "C" void read_int8(const void* at, float* out, int64_t count) { read<int8_t>(at, out, count); }
extern "C" void read_fp8(const void* at, float* out, int64_t count) { read<Float8>(at, out, count); }

extern "C" void read_int4(const void* at, float* out, int64_t count, float scale, int8_t zero) {
    const Group<Int4> group({at, &scale, &zero, count}, 0);
    for (int64_t k = 0; k < count; k += 2 * LANES) {
        Vector numbers[2];
        group.read(static_cast<const Int4*>(at) + k / 2, numbers);
        store(out + k, numbers[0]), store(out + k + LANES, numbers[1]);
    }
}

extern "C" void write_bfloat16(const float* at, void* out, int64_t count) {
    for (int64_t k = 0; k < count; k++) store(static_cast<BFloat16*>(out) + k, at[k]);
}

extern "C" void powers_of_two(const float* at, float* out, int64_t count) {
    for (int64_t k = 0; k < count; k += LANES) store(out + k, power_of_two(load(at + k)));
}

extern "C" float total(const float* at) { return sum(load(at)); }
