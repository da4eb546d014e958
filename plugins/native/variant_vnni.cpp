// AVX-512 with VNNI: as AVX-512, but many rows are multiplied as bytes, four products at a time.
//
// With m the largest |x| of a row's block of up to kBlockRows activations, and whole numbers
// |a|, |b|, |c| <= 127,
//
//     x = m / 127 * (a + b / 254 + c / 254^2)
//
// up to m * 6e-8, half a unit in the last place of a float32 between m / 2 and m. Weights and sums are exact: a
// block's are below 127 * 255 * 256 < 2^31. The instruction takes one factor without sign, so it
// gets weight + 128, and 128 * (sum of a) is taken off again.
#include "variant.h"

namespace {

constexpr size_t kTerms = 3;
constexpr float kTop = 127, kStep = 254;
constexpr float kLeast = 1e-36f;  // of which kTop / m is a float
constexpr size_t kQuad = 64;  // columns that are unpacked at once, into two strips

struct ByteStrips {
  typedef uint8_t Element;
  static constexpr size_t kTile = 4;
  static constexpr size_t kElementBytes = kTerms;
  static constexpr size_t kFactors = 1 + kTerms;  // m / 127, and what each term's sum starts from

  static size_t quads(size_t rows) { return (rows + 3) / 4; }

  static size_t padded(size_t columns) { return (columns + kQuad - 1) / kQuad * kQuad; }

  static size_t elements(size_t rows, size_t columns) { return quads(rows) * 4 * columns; }

  // Four rows side by side: strip [rows / 4][kStrip][4]. Columns stand in the order that unpacking
  // within 128 bits leaves them in, see `finished`.
  static void unpack(const int8_t* w, size_t stride, size_t rows, size_t columns,
                     uint8_t* strips) {
    const __m512i sign = _mm512_set1_epi8(INT8_MIN);
    const size_t strip = elements(rows, kStrip);
    for (size_t k = 0; k < rows; k += 4)
      for (size_t n = 0; n < columns; n += kQuad) {
        const size_t left = columns - n;
        const __mmask64 inside = left < kQuad ? (uint64_t{1} << left) - 1 : ~uint64_t{0};
        __m512i row[4];
#pragma GCC unroll 4
        for (size_t r = 0; r < 4; r++) {
          const int8_t* from = w + (k + r) * stride + n;
          row[r] = _mm512_maskz_loadu_epi8(k + r < rows ? inside : 0, from);
          row[r] = _mm512_xor_si512(row[r], sign);
        }
        const __m512i low01 = _mm512_unpacklo_epi8(row[0], row[1]);
        const __m512i low23 = _mm512_unpacklo_epi8(row[2], row[3]);
        const __m512i high01 = _mm512_unpackhi_epi8(row[0], row[1]);
        const __m512i high23 = _mm512_unpackhi_epi8(row[2], row[3]);
        uint8_t* to = strips + n / kStrip * strip + k * kStrip;
        _mm512_storeu_si512(to, _mm512_unpacklo_epi16(low01, low23));
        _mm512_storeu_si512(to + 64, _mm512_unpackhi_epi16(low01, low23));
        _mm512_storeu_si512(to + strip, _mm512_unpacklo_epi16(high01, high23));
        _mm512_storeu_si512(to + strip + 64, _mm512_unpackhi_epi16(high01, high23));
      }
  }

  // The sums of W columns from n on, a multiple of W. Of a quad's four vectors, vector v holds in
  // its part p of 4 floats the columns 16 p + 4 v and on.
  static Vec finished(const float* sums, size_t n) {
    Vec whole;
    const float* from = sums + n / kQuad * kQuad + n % kQuad / 4;
    for (size_t v = 0; v < 4; v++)
      memcpy(reinterpret_cast<float*>(&whole) + 4 * v, from + v * W, 4 * sizeof(float));
    return whole;
  }

  template <size_t M>
  static void tile(const char* x, const float* factors, size_t factors_stride,
                   const uint8_t* strip, size_t rows, float* y, size_t y_stride) {
    IntVec sum[M * kTerms][2];
#pragma GCC unroll 16
    for (size_t m = 0; m < M * kTerms; m++) {
      int32_t start;
      memcpy(&start, factors + m / kTerms * factors_stride + 1 + m % kTerms, sizeof start);
      sum[m][0] = sum[m][1] = start - IntVec{};
    }
    for (size_t k = 0; k < rows; k += 4, strip += 4 * kStrip, x += M * kTerms * 4) {
      const __m512i w0 = _mm512_loadu_si512(strip), w1 = _mm512_loadu_si512(strip + 64);
#pragma GCC unroll 16
      for (size_t m = 0; m < M * kTerms; m++) {
        int32_t four;
        memcpy(&four, x + m * sizeof four, sizeof four);
        const __m512i codes = _mm512_set1_epi32(four);
        sum[m][0] = (IntVec)_mm512_dpbusd_epi32((__m512i)sum[m][0], w0, codes);
        sum[m][1] = (IntVec)_mm512_dpbusd_epi32((__m512i)sum[m][1], w1, codes);
      }
    }
#pragma GCC unroll 16
    for (size_t m = 0; m < M; m++)
#pragma GCC unroll 2
      for (size_t v = 0; v < 2; v++) {
        const Vec a = __builtin_convertvector(sum[m * kTerms][v], Vec);
        const Vec b = __builtin_convertvector(sum[m * kTerms + 1][v], Vec);
        const Vec c = __builtin_convertvector(sum[m * kTerms + 2][v], Vec);
        float* to = y + m * y_stride + v * W;
        const Vec terms = (c * (1 / kStep) + b) * (1 / kStep) + a;
        store(to, terms * factors[m * factors_stride] + load(to));
      }
  }

  static void pack(const float* const* rows, size_t first, size_t count,
                   const grok1::PackedRows& packed) {
    const size_t width = packed.group_columns(), padded = packed.stride() / packed.groups;
    char* to = packed.data + first * packed.stride() * kElementBytes;
    float* factors = packed.factors + first * packed.blocks() * kFactors;
    for (size_t block = 0; block < packed.blocks(); block++) {
      const size_t g = block / packed.blocks_per_group();
      const size_t begin = block % packed.blocks_per_group() * grok1::kBlockRows;
      const size_t length = width - begin < grok1::kBlockRows ? width - begin : grok1::kBlockRows;
      char* place = to + (g * padded + begin) * count * kElementBytes;
      for (size_t m = 0; m < count; m++)
        pack_block(rows[m] + g * width + begin, length, place + m * kTerms * 4,
                   count * kTerms * 4, factors + (m * packed.blocks() + block) * kFactors);
    }
  }

  // Writes the terms of one row's block, four k of a term side by side, `stride` bytes from four to
  // four.
  static void pack_block(const float* x, size_t length, char* to, size_t stride, float* factors) {
    Vec most = {}, sum = {};
    for (size_t k = 0; k < length; k += W) {
      const Vec magnitude = _mm512_abs_ps(_mm512_maskz_loadu_ps(mask(length - k), x + k));
      most = maximum(most, magnitude);
      sum += magnitude;
    }
    const float high = largest(most);
    const float codes = high > kLeast ? kTop / high : 0.0f;
    __m512i sums[kTerms] = {};
    for (size_t k = 0; k < length; k += W) {
      __m512 rest = _mm512_maskz_loadu_ps(mask(length - k), x + k) * codes;
      int8_t bytes[kTerms][W];
      for (size_t t = 0; t < kTerms; t++) {
        const __m512i term = _mm512_cvtps_epi32(rest);
        rest = (rest - _mm512_cvtepi32_ps(term)) * kStep;
        sums[t] = _mm512_add_epi32(sums[t], term);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes[t]), _mm512_cvtsepi32_epi8(term));
      }
      for (size_t four = 0; four < W && k + four < length; four += 4, to += stride)
        for (size_t t = 0; t < kTerms; t++) memcpy(to + t * 4, bytes[t] + four, 4);
    }
    factors[0] = std::isnan(total(sum)) ? NAN : high / kTop;  // the largest has none
    for (size_t t = 0; t < kTerms; t++) {
      const int32_t start = -128 * _mm512_reduce_add_epi32(sums[t]);
      memcpy(factors + 1 + t, &start, sizeof start);
    }
  }

  static __mmask16 mask(size_t left) {
    return static_cast<__mmask16>(left < W ? (1u << left) - 1 : 0xffff);
  }
};

}  // namespace

namespace grok1 {
const Variant kAvx512Vnni = variant_of<ByteStrips>("avx512_vnni");
}  // namespace grok1
