/* AdamW on weights kept as a bf16 wire copy plus a 16-bit remainder, one pass over memory.
 *
 * master bits = (wire << 16) + remainder (signed); the new master is split again with wire rounded half up.
 * Every operation is rounded on its own (no fused multiply-add), in the order of adamw.py's reference.
 * Returns 1 if a new master is not finite, else 0. */
#include <stdint.h>
#include <math.h>

typedef union { uint32_t bits; float value; } word;

static inline float bf16(uint16_t half) { word w = { (uint32_t)half << 16 }; return w.value; }

#define BODY(GRADIENT)                                                                                   \
    int bad = 0;                                                                                         \
    _Pragma("omp parallel for simd schedule(static) reduction(|:bad) num_threads(threads)")              \
    for (int64_t i = 0; i < n; i++) {                                                                    \
        word w; w.bits = ((uint32_t)wire[i] << 16) + (uint32_t)(int32_t)remainder[i];                    \
        float g = (GRADIENT) / divisor * factor;                                                         \
        float p = w.value * keep;                                                                        \
        float m1 = m[i] * beta1 + g * (1.0f - beta1);                                                    \
        float v1 = v[i] * beta2 + g * g * (1.0f - beta2);                                                \
        m[i] = m1; v[i] = v1;                                                                            \
        float denominator = sqrtf(v1) * inverse_root + eps;                                              \
        w.value = p - m1 / denominator * rate;                                                           \
        bad |= (w.bits & 0x7f800000u) == 0x7f800000u;                                                    \
        uint16_t high = (uint16_t)((w.bits + 0x8000u) >> 16);                                            \
        wire[i] = high;                                                                                  \
        remainder[i] = (int16_t)(uint16_t)(w.bits - ((uint32_t)high << 16));                             \
    }                                                                                                    \
    return bad

int adamw_bf16_gradient(uint16_t *restrict wire, int16_t *restrict remainder, float *restrict m, float *restrict v,
                        const uint16_t *restrict gradient, int64_t n, float divisor, float factor, float keep,
                        float beta1, float beta2, float inverse_root, float eps, float rate, int threads)
{
    BODY(bf16(gradient[i]));
}

int adamw_fp32_gradient(uint16_t *restrict wire, int16_t *restrict remainder, float *restrict m, float *restrict v,
                        const float *restrict gradient, int64_t n, float divisor, float factor, float keep,
                        float beta1, float beta2, float inverse_root, float eps, float rate, int threads)
{
    BODY(gradient[i]);
}
