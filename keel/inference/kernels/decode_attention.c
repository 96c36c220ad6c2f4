/* Decode attention: one query per row (sequence), against spans of keys and values anywhere in memory; and RoPE.

   Prompts that several rows share are read in place, by one row after another while they are in the cache. The result
   of a row depends on that row alone, bit for bit. Sliding windows, soft caps and sinks are not supported. */
#include "simd.h"

#define KEY_BLOCK 4  /* keys that are scored together */
#define HEAD_BLOCK 3 /* query heads that read them together, at most */

/* Keys and values [key heads, length, width] that one row or more read; `head_stride` floats from one key head to the
   next, the keys of a head contiguous. */
typedef struct {
    const float *keys, *values;
    int64_t length, head_stride;
} KeySpan;

/* Scores of `heads` queries, query_stride floats apart, for `length` keys of one key head: scores[head * scores_stride
   + key]. */
INLINE void compute_scores(const float *query, int64_t query_stride, const int heads, const float *keys, int64_t length,
                           int64_t width, float *scores, int64_t scores_stride) {
    int64_t key = 0;
    for (; key + KEY_BLOCK <= length; key += KEY_BLOCK, keys += KEY_BLOCK * width) {
        vec total[HEAD_BLOCK][KEY_BLOCK] = {0};
        for (int64_t i = 0; i < width; i += LANES) {
#pragma GCC unroll 3
            for (int head = 0; head < heads; head++) {
                vec q = load(query + head * query_stride + i);
#pragma GCC unroll 4
                for (int next = 0; next < KEY_BLOCK; next++) total[head][next] += q * load(keys + next * width + i);
            }
        }
#pragma GCC unroll 3
        for (int head = 0; head < heads; head++)
#pragma GCC unroll 4
            for (int next = 0; next < KEY_BLOCK; next++)
                scores[head * scores_stride + key + next] = sum_lanes(total[head][next]);
    }
    for (; key < length; key++, keys += width)
        for (int head = 0; head < heads; head++) {
            vec total = {0};
            for (int64_t i = 0; i < width; i += LANES)
                total += load(query + head * query_stride + i) * load(keys + i);
            scores[head * scores_stride + key] = sum_lanes(total);
        }
}

/* Replace `count` scores by exp(scale * (score - largest score)) and return their sum. Scores up to the next multiple
   of LANES are overwritten with zero. */
static float softmax_unnormalised(float *scores, int64_t count, float scale) {
    for (int64_t key = count; key % LANES; key++) scores[key] = -INFINITY;
    vec lane_max = broadcast(-INFINITY), total = {0};
    for (int64_t key = 0; key < count; key += LANES) {
        vec score = load(scores + key);
        lane_max = blend(score > lane_max, score, lane_max);
    }
    float max = lane_max[0];
    for (int lane = 1; lane < LANES; lane++) max = lane_max[lane] > max ? lane_max[lane] : max;
    for (int64_t key = 0; key < count; key += LANES) {
        vec weight = vexp((load(scores + key) - max) * scale);
        store(scores + key, weight);
        total += weight;
    }
    return sum_lanes(total);
}

/* total[head] += sum over keys of weights[head, key] * values[key], for `heads` heads and `vectors` vectors of each
   value */
INLINE void weighted_sum(const float *weights, int64_t weights_stride, const int heads, const float *values,
                         int64_t length, int64_t width, const int vectors, vec total[HEAD_BLOCK][4]) {
    for (int64_t key = 0; key < length; key++, values += width) {
#pragma GCC unroll 3
        for (int head = 0; head < heads; head++) {
            float weight = weights[head * weights_stride + key];
#pragma GCC unroll 4
            for (int next = 0; next < vectors; next++) total[head][next] += weight * load(values + next * LANES);
        }
    }
}

/* Attention of one row for `heads` query heads that read the key head `kv_head` of `count` spans. */
INLINE void attend(const float *query, int64_t query_stride, const int heads, const KeySpan *spans, int64_t count,
                   int64_t kv_head, int64_t width, float scale, float *scores, int64_t scores_stride, float *out,
                   int64_t out_stride) {
    float total[HEAD_BLOCK];
    int64_t keys = 0;
    for (int64_t i = 0; i < count; i++) {
        const KeySpan *span = spans + i;
        compute_scores(query, query_stride, heads, span->keys + kv_head * span->head_stride, span->length, width,
                       scores + keys, scores_stride);
        keys += span->length;
    }
    for (int head = 0; head < heads; head++)
        total[head] = softmax_unnormalised(scores + head * scores_stride, keys, scale);
    for (int64_t column = 0; column < width;) {
        vec sums[HEAD_BLOCK][4] = {0};
        int vectors = column + 4 * LANES <= width ? 4 : 1;
        int64_t first_key = 0;
        for (int64_t i = 0; i < count; i++) {
            const KeySpan *span = spans + i;
            const float *values = span->values + kv_head * span->head_stride + column;
            if (vectors == 4)
                weighted_sum(scores + first_key, scores_stride, heads, values, span->length, width, 4, sums);
            else
                weighted_sum(scores + first_key, scores_stride, heads, values, span->length, width, 1, sums);
            first_key += span->length;
        }
        for (int head = 0; head < heads; head++)
            for (int next = 0; next < vectors; next++)
                store(out + head * out_stride + column + next * LANES, sums[head][next] / total[head]);
        column += vectors * LANES;
    }
}

/* Decode attention: out = softmax(scale * query keys) values, where each row has its own keys.

   query: [kv_heads, group_size, rows, width], with the strides kv_head_stride, head_stride and row_stride in floats and
      unit stride along the width, which is a multiple of LANES. group_size query heads read one key head.
   row_start: [rows + 1]; row i reads the spans row_start[i] to row_start[i + 1] - 1 and has at least one key.
   keys, values, length, span_stride: one number per span: the addresses of its first key and value, the number of keys,
      and the floats from one key head to the next (of keys and of values).
   scores: overwritten; threads * group_size * max_keys floats. max_keys is a multiple of LANES and at least the number
      of keys of any row.
   threads: the largest number of threads to use.
   out: written, [rows, kv_heads * group_size, width], with out_stride floats between rows, else contiguous.
   Returns 0, or 1 if there is no memory for the list of spans; `out` is then unchanged. */
int decode_attention(const float *query, int64_t kv_head_stride, int64_t head_stride, int64_t row_stride,
                     int64_t kv_heads, int64_t group_size, int64_t rows, int64_t width, const int64_t *row_start,
                     const int64_t *keys, const int64_t *values, const int64_t *length, const int64_t *span_stride,
                     float scale, float *scores, int64_t max_keys, int64_t threads, float *out, int64_t out_stride) {
    int64_t num_spans = row_start[rows];
    KeySpan *spans = malloc(sizeof(KeySpan) * (size_t)(num_spans + 1));
    if (!spans) return 1;
    int64_t pairs = 0;
    for (int64_t i = 0; i < num_spans; i++) {
        spans[i] = (KeySpan){(const float *)keys[i], (const float *)values[i], length[i], span_stride[i]};
        pairs += length[i];
    }
#pragma omp parallel num_threads((int)threads) if (2 * pairs * kv_heads * group_size * width > PARALLEL_FLOPS)
    {
        float *own_scores = scores + omp_get_thread_num() * group_size * max_keys;
#pragma omp for schedule(static)
        for (int64_t item = 0; item < kv_heads * rows; item++) { /* rows of one prompt follow one another */
            int64_t kv_head = item / rows, row = item % rows, count = row_start[row + 1] - row_start[row];
            for (int64_t head = 0; head < group_size; head += HEAD_BLOCK) {
                const float *q = query + kv_head * kv_head_stride + head * head_stride + row * row_stride;
                float *to = out + row * out_stride + (kv_head * group_size + head) * width;
                const KeySpan *read = spans + row_start[row];
                switch (min_i64(HEAD_BLOCK, group_size - head)) { /* the number of heads must be a constant */
                case 1:
                    attend(q, head_stride, 1, read, count, kv_head, width, scale, own_scores, max_keys, to, width);
                    break;
                case 2:
                    attend(q, head_stride, 2, read, count, kv_head, width, scale, own_scores, max_keys, to, width);
                    break;
                default:
                    attend(q, head_stride, 3, read, count, kv_head, width, scale, own_scores, max_keys, to, width);
                }
            }
        }
    }
    free(spans);
    return 0;
}

/* Rotary embeddings, in place: element i of each head is paired with element i + width / 2.

   states: [rows, heads, width], with row_stride floats between rows, else contiguous; width is even.
   cosine, sine: contiguous [rows, width / 2], of the angle of each pair. */
void apply_rope(float *states, int64_t rows, int64_t row_stride, int64_t heads, int64_t width, const float *cosine,
                const float *sine) {
    int64_t half = width / 2;
#pragma omp parallel for schedule(static) if (rows * heads * width > PARALLEL_COPIES)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < heads; head++) {
            float *low = states + row * row_stride + head * width, *high = low + half;
            const float *c = cosine + row * half, *s = sine + row * half;
            for (int64_t i = 0; i < half; i++) {
                float a = low[i], b = high[i];
                low[i] = a * c[i] - b * s[i];
                high[i] = b * c[i] + a * s[i];
            }
        }
}
