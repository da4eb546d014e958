// Vectors of W floats by the compiler's own vector types: one source for every instruction set.
//
// Included once in each variant's file, which is compiled for its instruction set alone. All is in
// an anonymous namespace: a function of one instruction set must not serve in place of another's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr size_t W = 16;
#elif defined(__AVX2__)
constexpr size_t W = 8;
#else
constexpr size_t W = 4;
#endif

typedef float Vec __attribute__((vector_size(4 * W)));
typedef int32_t IntVec __attribute__((vector_size(4 * W)));

inline Vec load(const float* p) {
  Vec v;
  memcpy(&v, p, sizeof v);
  return v;
}

inline void store(float* p, Vec v) { memcpy(p, &v, sizeof v); }

inline Vec all(float x) { return x - Vec{}; }

// W int8 as floats. GCC 12 would take a vector apart to convert it.
inline Vec widen(const int8_t* p) {
#if defined(__AVX512F__)
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#elif defined(__x86_64__)
  const __m128i bytes = _mm_loadu_si32(p), pairs = _mm_unpacklo_epi8(bytes, bytes);
  return _mm_cvtepi32_ps(_mm_srai_epi32(_mm_unpacklo_epi16(pairs, pairs), 24));
#elif defined(__aarch64__)
  int32_t bytes;
  memcpy(&bytes, p, sizeof bytes);
  const int16x8_t pairs = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(bytes)));
  return (Vec)vcvtq_f32_s32(vmovl_s16(vget_low_s16(pairs)));
#else
  return Vec{float(p[0]), float(p[1]), float(p[2]), float(p[3])};
#endif
}

template <class T>
inline T bits(Vec v) {
  T t;
  memcpy(&t, &v, sizeof t);
  return t;
}

inline Vec from_bits(IntVec v) {
  Vec f;
  memcpy(&f, &v, sizeof f);
  return f;
}

// Both keep a NaN in a.
inline Vec minimum(Vec a, Vec b) { return a > b ? b : a; }
inline Vec maximum(Vec a, Vec b) { return a < b ? b : a; }

inline float total(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(v);
#elif defined(__AVX2__)
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
#else
  float lanes[W];
  store(lanes, v);
  for (size_t half = W / 2; half; half /= 2)
    for (size_t i = 0; i < half; i++) lanes[i] += lanes[i + half];
  return lanes[0];
#endif
}

inline float largest(Vec v) {
  float lanes[W], most;
  store(lanes, v);
  most = lanes[0];
  for (size_t i = 1; i < W; i++) most = lanes[i] > most ? lanes[i] : most;
  return most;
}

// exp(x) - 1 and exp(x), from exp(x) = 2^n exp(r), |r| <= ln(2) / 2, and the Taylor series of
// exp(r) - 1 up to r^7, whose next term is below 6e-9.
struct Exponential {
  Vec power, less_one;  // 2^n, exp(r) - 1
};

inline Exponential reduced(Vec x) {
  constexpr float log2e = 1.44269504f, ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
  const Vec magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  x = minimum(maximum(x, all(-87.0f)), all(88.0f));
  const Vec n = (x * log2e + magic) - magic;
  const Vec r = (x - n * ln2_high) - n * ln2_low;
  Vec series = all(1.0f / 5040);
  for (const float factor : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 1.0f / 2})
    series = series * r + factor;
  const IntVec exponent = (__builtin_convertvector(n, IntVec) + 127) << 23;
  return {from_bits(exponent), r * r * series + r};
}

inline Vec exp_of(Vec x) {
  const Exponential e = reduced(x);
  return e.power * e.less_one + e.power;
}

inline Vec tanh_of(Vec x) {
  const IntVec sign = bits<IntVec>(x) & INT32_MIN;
  const Vec magnitude = from_bits(bits<IntVec>(x) ^ sign);
  const Exponential e = reduced(magnitude * -2.0f);
  const Vec less_one = e.power * e.less_one + (e.power - 1.0f);  // exp(-2|x|) - 1, near 0 too
  return from_bits(bits<IntVec>(-less_one / (less_one + 2.0f)) | sign);
}

// gelu in its tanh form: x / (1 + exp(-2u)), u = sqrt(2 / pi) (x + 0.044715 x^3).
inline Vec gelu(Vec x) {
  constexpr float factor = 0.7978845608f;
  const Vec u = x * (x * x * (factor * 0.044715f) + factor);
  return x / (exp_of(u * -2.0f) + 1.0f);
}

}  // namespace
