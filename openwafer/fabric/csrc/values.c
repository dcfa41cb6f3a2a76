/* What instructions compute: the same as arithmetic.py, bit for bit. Integer elements travel in the bits of floats. */
#include "engine.h"
#include <math.h>
#include <string.h>
#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__F16C__)
#include <immintrin.h>
#endif

u32 type_bytes(i32 dtype) { return dtype == T_F32 || dtype == T_I32 ? 4 : 2; }

static int is_integer(i32 dtype) { return dtype == T_I32 || dtype == T_I16; }

float half_to_float(u16 bits) {
    _Float16 half;
    memcpy(&half, &bits, 2);
    return (float)half;
}

static u16 float_to_half(float value) {
    _Float16 half = (_Float16)value;
    u16 bits;
    memcpy(&bits, &half, 2);
    return bits;
}

static u16 float_to_bf16(float value) {
    u32 bits;
    memcpy(&bits, &value, 4);
    if (value != value) return (u16)(bits >> 16 | 0x40);
    return (u16)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

static void halves_to_floats(const u8 *from, i32 count, float *to) {
    i32 i = 0;
#if defined(__aarch64__)
    for (; i + 4 <= count; i += 4) vst1q_f32(to + i, vcvt_f32_f16(vld1_f16((const float16_t *)(from + 2 * i))));
#elif defined(__F16C__)
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + 2 * i))));
#endif
    for (; i < count; i++) {
        u16 bits;
        memcpy(&bits, from + 2 * i, 2);
        to[i] = half_to_float(bits);
    }
}

static void floats_to_halves(u8 *to, i32 count, const float *from) {
    i32 i = 0;
#if defined(__aarch64__)
    for (; i + 4 <= count; i += 4) vst1_f16((float16_t *)(to + 2 * i), vcvt_f16_f32(vld1q_f32(from + i)));
#elif defined(__F16C__)
    for (; i + 8 <= count; i += 8)
        _mm_storeu_si128((__m128i *)(to + 2 * i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 0));
#endif
    for (; i < count; i++) {
        u16 bits = float_to_half(from[i]);
        memcpy(to + 2 * i, &bits, 2);
    }
}

void load_elements(i32 dtype, const u8 *from, i32 stride, i32 count, float *to) {
    if (dtype == T_F16 && stride == 1) {
        halves_to_floats(from, count, to);
        return;
    }
    if (type_bytes(dtype) == 4) {
        if (stride == 1) memcpy(to, from, 4 * (size_t)count);
        else
            for (i32 i = 0; i < count; i++) memcpy(to + i, from + 4 * (i64)stride * i, 4);
        return;
    }
    for (i32 i = 0; i < count; i++) {
        u16 bits;
        memcpy(&bits, from + 2 * (i64)stride * i, 2);
        if (dtype == T_F16) to[i] = half_to_float(bits);
        else {
            u32 wide = dtype == T_BF16 ? (u32)bits << 16 : (u32)(i32)(i16)bits;
            memcpy(to + i, &wide, 4);
        }
    }
}

void store_elements(i32 dtype, u8 *to, i32 stride, i32 count, const float *from) {
    if (dtype == T_F16 && stride == 1) {
        floats_to_halves(to, count, from);
        return;
    }
    if (type_bytes(dtype) == 4) {
        if (stride == 1) memcpy(to, from, 4 * (size_t)count);
        else
            for (i32 i = 0; i < count; i++) memcpy(to + 4 * (i64)stride * i, from + i, 4);
        return;
    }
    for (i32 i = 0; i < count; i++) {
        u16 bits;
        if (dtype == T_I16) memcpy(&bits, from + i, 2);
        else bits = dtype == T_F16 ? float_to_half(from[i]) : float_to_bf16(from[i]);
        memcpy(to + 2 * (i64)stride * i, &bits, 2);
    }
}

/* One element per wavelet; 16-bit elements fill its lower half. */
void words_to_elements(i32 dtype, const u32 *from, i32 count, float *to) {
    if (type_bytes(dtype) == 4) memcpy(to, from, 4 * (size_t)count);
    else
        for (i32 i = 0; i < count; i++) {
            u16 half = (u16)from[i];
            load_elements(dtype, (const u8 *)&half, 1, 1, to + i);
        }
}

void elements_to_words(i32 dtype, u32 *to, i32 count, const float *from) {
    if (type_bytes(dtype) == 4) memcpy(to, from, 4 * (size_t)count);
    else
        for (i32 i = 0; i < count; i++) {
            u16 half;
            store_elements(dtype, (u8 *)&half, 1, 1, from + i);
            to[i] = half;
        }
}

float slow_function(i32 op, float x) {
    if (op == OP_EXP || op == OP_FEXP) return (float)exp((double)x);
    if (op == OP_RECIP || op == OP_FRECIP) return x != 0 ? (float)(1.0 / (double)x) : copysignf(INFINITY, x);
    if (x < 0 || x != x) return NAN;
    return x != 0 ? (float)(1.0 / sqrt((double)x)) : INFINITY;
}

static void compute_integers(i32 op, i32 count, const u32 *a, const u32 *b, const u32 *dst, u32 *out) {
    for (i32 i = 0; i < count; i++) switch (op) {
        case OP_ADD: out[i] = a[i] + b[i]; break;
        case OP_SUB: out[i] = a[i] - b[i]; break;
        case OP_MUL: out[i] = a[i] * b[i]; break;
        case OP_MAX: out[i] = (i32)a[i] > (i32)b[i] ? a[i] : b[i]; break;
        case OP_MAC: out[i] = dst[i] + a[i] * b[i]; break;
        default: out[i] = a[i];
        }
}

void compute(i32 op, i32 dtype, i32 count, const float *a, const float *b, const float *dst, float *out) {
    if (op == OP_MOV || op == OP_CONVERT) {
        if (out != a) memmove(out, a, 4 * (size_t)count);
        return;
    }
    if (is_integer(dtype)) {
        compute_integers(op, count, (const u32 *)a, (const u32 *)b, (const u32 *)dst, (u32 *)out);
        return;
    }
    switch (op) {
    case OP_ADD: for (i32 i = 0; i < count; i++) out[i] = a[i] + b[i]; break;
    case OP_SUB: for (i32 i = 0; i < count; i++) out[i] = a[i] - b[i]; break;
    case OP_MUL: for (i32 i = 0; i < count; i++) out[i] = a[i] * b[i]; break;
    case OP_MAX: for (i32 i = 0; i < count; i++) out[i] = a[i] > b[i] ? a[i] : b[i]; break;
    case OP_MAC: for (i32 i = 0; i < count; i++) out[i] = dst[i] + a[i] * b[i]; break;
    default: for (i32 i = 0; i < count; i++) out[i] = slow_function(op, a[i]);
    }
}

float reduce(i32 op, i32 dtype, float total, i32 count, const float *a, const float *b) {
    for (i32 i = 0; i < count; i++) {
        float x = a[i];
        if (is_integer(dtype)) {
            i32 whole;
            memcpy(&whole, a + i, 4);
            x = (float)whole;
        }
        if (op == OP_DOT) {
            float y = b[i];
            if (is_integer(dtype)) {
                i32 whole;
                memcpy(&whole, b + i, 4);
                y = (float)whole;
            }
            x = x * y;
        }
        if (op == OP_MAXOF) total = x > total ? x : total;
        else total = total + x;
    }
    return total;
}

void convert(i32 from, i32 to, i32 count, float *values) {
    for (i32 i = 0; i < count; i++) {
        i32 whole;
        if (is_integer(from) && !is_integer(to)) {
            memcpy(&whole, values + i, 4);
            values[i] = (float)whole;
        } else if (!is_integer(from) && is_integer(to)) {
            double limit = to == T_I16 ? 32768.0 : 2147483648.0, value = values[i];
            value = value != value ? 0 : value > limit - 1 ? limit - 1 : value < -limit ? -limit : value;
            whole = (i32)value;
            memcpy(values + i, &whole, 4);
        }
    }
}

/* c[m] = round(c[m] + a[m] * b) for one column of 16-bit floats held as floats. */
static void tile_column_f16(float *c, const float *a, float b, i32 m) {
    i32 i = 0;
#if defined(__aarch64__)
    for (; i + 4 <= m; i += 4) {
        float32x4_t sum = vaddq_f32(vld1q_f32(c + i), vmulq_n_f32(vld1q_f32(a + i), b));
        vst1q_f32(c + i, vcvt_f32_f16(vcvt_f16_f32(sum)));
    }
#elif defined(__F16C__)
    for (; i + 8 <= m; i += 8) {
        __m256 sum = _mm256_add_ps(_mm256_loadu_ps(c + i), _mm256_mul_ps(_mm256_loadu_ps(a + i), _mm256_set1_ps(b)));
        _mm256_storeu_ps(c + i, _mm256_cvtph_ps(_mm256_cvtps_ph(sum, 0)));
    }
#endif
    for (; i < m; i++) {
        float product = a[i] * b;
        c[i] = half_to_float(float_to_half(c[i] + product));
    }
}

static void tile_column(i32 dtype, float *c, const float *a, float b, i32 m) {
    if (dtype == T_F16) tile_column_f16(c, a, b, m);
    else if (dtype == T_F32)
        for (i32 i = 0; i < m; i++) c[i] = c[i] + a[i] * b;
    else if (is_integer(dtype)) {
        u32 *ci = (u32 *)c, bits;
        memcpy(&bits, &b, 4);
        for (i32 i = 0; i < m; i++) {
            u32 sum = ci[i] + ((const u32 *)a)[i] * bits;
            ci[i] = dtype == T_I16 ? (u32)(i32)(i16)sum : sum;
        }
    } else
        for (i32 i = 0; i < m; i++) {
            u32 wide = (u32)float_to_bf16(c[i] + a[i] * b) << 16;
            memcpy(c + i, &wide, 4);
        }
}

enum { STRIP = 64, DEPTH = 64 }; /* rows and steps of A that are held as floats on the stack */

/* c[m, n] += a[m, k] @ b[k, n] for at most STRIP rows and DEPTH steps; `m` and `full` are the heights of A and C in
 * memory and the depth of B. Each element sees its steps in order. */
static void tile_block(i32 dtype, u8 *c, const u8 *a, const u8 *b, i32 rows, i32 n, i32 k, i32 m, i32 full) {
    float columns_a[DEPTH * STRIP], column_b[DEPTH], column_c[STRIP];
    u32 size = type_bytes(dtype);
    if (rows == m) load_elements(dtype, a, 1, rows * k, columns_a);
    else
        for (i32 step = 0; step < k; step++)
            load_elements(dtype, a + (size_t)size * (size_t)step * (size_t)m, 1, rows, columns_a + step * rows);
    for (i32 column = 0; column < n; column++) {
        u8 *target = c + (size_t)size * (size_t)column * (size_t)m;
        load_elements(dtype, target, 1, rows, column_c);
        load_elements(dtype, b + (size_t)size * (size_t)column * (size_t)full, 1, k, column_b);
        for (i32 step = 0; step < k; step++)
            tile_column(dtype, column_c, columns_a + step * rows, column_b[step], rows);
        store_elements(dtype, target, 1, rows, column_c);
    }
}

void tile(i32 dtype, u8 *c, const u8 *a, const u8 *b, i32 m, i32 n, i32 k) {
    size_t size = type_bytes(dtype);
    for (i32 row = 0; row < m; row += STRIP)
        for (i32 step = 0; step < k; step += DEPTH) {
            i32 rows = m - row < STRIP ? m - row : STRIP, steps = k - step < DEPTH ? k - step : DEPTH;
            tile_block(dtype, c + size * (size_t)row, a + size * ((size_t)step * (size_t)m + (size_t)row),
                       b + size * (size_t)step, rows, n, steps, m, k);
        }
}
