/* Attention of answers under way: one query a row, against stretches of keys and values that lie anywhere in memory.

   The prompts that rows share are read where they are, by one row after another while they are in the cache. What a row
   gets depends on that row alone, bit for bit. Leaves out windows, soft caps and sinks. */
#include "common.h"

#define KEYS 4  /* scored at once */
#define HEADS 3 /* that read them at once, at most */

/* keys and values [groups, any, width] of one row or more, of which the first `length` count */
typedef struct {
    const float *keys, *values;
    int64_t length, along_group;
} Stretch;

/* scores of `heads` queries, `along` floats apart, for all keys of a stretch */
INLINE void score(const float *query, int64_t along, const int heads, const float *keys, int64_t length, int64_t width,
                  float *scores, int64_t room) {
    int64_t key = 0;
    for (; key + KEYS <= length; key += KEYS, keys += KEYS * width) {
        vec found[HEADS][KEYS] = {0};
        for (int64_t place = 0; place < width; place += LANES) {
#pragma GCC unroll 3
            for (int head = 0; head < heads; head++) {
                vec here = load(query + head * along + place);
#pragma GCC unroll 4
                for (int next = 0; next < KEYS; next++) found[head][next] += here * load(keys + next * width + place);
            }
        }
#pragma GCC unroll 3
        for (int head = 0; head < heads; head++)
#pragma GCC unroll 4
            for (int next = 0; next < KEYS; next++) scores[head * room + key + next] = sum(found[head][next]);
    }
    for (; key < length; key++, keys += width)
        for (int head = 0; head < heads; head++) {
            vec found = {0};
            for (int64_t place = 0; place < width; place += LANES)
                found += load(query + head * along + place) * load(keys + place);
            scores[head * room + key] = sum(found);
        }
}

/* from scores to shares that are not yet divided by their sum, which is given back; in place, up to whole vectors */
static float softened(float *scores, int64_t count, float scale) {
    for (int64_t key = count; key % LANES; key++) scores[key] = -INFINITY;
    vec tops = all(-INFINITY), total = {0};
    for (int64_t key = 0; key < count; key += LANES) {
        vec here = load(scores + key);
        tops = pick(here > tops, here, tops);
    }
    float top = tops[0];
    for (int lane = 1; lane < LANES; lane++) top = tops[lane] > top ? tops[lane] : top;
    for (int64_t key = 0; key < count; key += LANES) {
        vec share = vexp((load(scores + key) - top) * scale);
        store(scores + key, share);
        total += share;
    }
    return sum(total);
}

/* shares times values, for `vectors` vectors of each of `heads` heads, on top of what is found */
INLINE void mix(const float *shares, int64_t room, const int heads, const float *values, int64_t length, int64_t width,
                const int vectors, vec found[HEADS][4]) {
    for (int64_t key = 0; key < length; key++, values += width) {
#pragma GCC unroll 3
        for (int head = 0; head < heads; head++) {
            float share = shares[head * room + key];
#pragma GCC unroll 4
            for (int next = 0; next < vectors; next++) found[head][next] += share * load(values + next * LANES);
        }
    }
}

/* one row and `heads` heads that read one key head */
INLINE void attend(const float *query, int64_t along, const int heads, const Stretch *stretches, int64_t count,
                   int64_t group, int64_t width, float scale, float *scores, int64_t room, float *out, int64_t along_out) {
    float total[HEADS];
    int64_t keys = 0;
    for (int64_t one = 0; one < count; one++) {
        const Stretch *here = stretches + one;
        score(query, along, heads, here->keys + group * here->along_group, here->length, width, scores + keys, room);
        keys += here->length;
    }
    for (int head = 0; head < heads; head++) total[head] = softened(scores + head * room, keys, scale);
    for (int64_t place = 0; place < width;) {
        vec found[HEADS][4] = {0};
        int vectors = place + 4 * LANES <= width ? 4 : 1;
        int64_t before = 0;
        for (int64_t one = 0; one < count; one++) {
            const Stretch *here = stretches + one;
            const float *values = here->values + group * here->along_group + place;
            if (vectors == 4)
                mix(scores + before, room, heads, values, here->length, width, 4, found);
            else
                mix(scores + before, room, heads, values, here->length, width, 1, found);
            before += here->length;
        }
        for (int head = 0; head < heads; head++)
            for (int next = 0; next < vectors; next++)
                store(out + head * along_out + place + next * LANES, found[head][next] / total[head]);
        place += vectors * LANES;
    }
}

/* query [groups, rest, rows, width], out [rows, groups * rest, width]; row i reads stretches first[i] to first[i + 1].
   `scores` has room for `rest` times `room` floats for each thread, `room` a multiple of LANES that holds the keys of
   any row. Returns 0, or 1 when there are more threads than `scores` is for. */
int attend_rows(const float *query, int64_t along_group, int64_t along_rest, int64_t along_row, int64_t groups,
                int64_t rest, int64_t rows, int64_t width, const int64_t *first, const int64_t *keys,
                const int64_t *values, const int64_t *length, const int64_t *along, float scale, float *scores,
                int64_t room, int64_t threads, float *out, int64_t along_out) {
    int64_t every = first[rows];
    Stretch *stretches = malloc(sizeof(Stretch) * (size_t)(every + 1));
    if (!stretches) return 1;
    int64_t pairs = 0;
    for (int64_t one = 0; one < every; one++) {
        stretches[one] = (Stretch){(const float *)keys[one], (const float *)values[one], length[one], along[one]};
        pairs += length[one];
    }
#pragma omp parallel num_threads((int)threads) if (2 * pairs * groups * rest * width > WORTH)
    {
        float *own = scores + omp_get_thread_num() * rest * room;
#pragma omp for schedule(static)
        for (int64_t item = 0; item < groups * rows; item++) { /* rows of one prompt side by side */
            int64_t group = item / rows, row = item % rows, count = first[row + 1] - first[row];
            for (int64_t head = 0; head < rest; head += HEADS) {
                const float *from = query + group * along_group + head * along_rest + row * along_row;
                float *to = out + row * along_out + (group * rest + head) * width;
                const Stretch *read = stretches + first[row];
                switch (least(HEADS, rest - head)) {
                case 1: attend(from, along_rest, 1, read, count, group, width, scale, own, room, to, width); break;
                case 2: attend(from, along_rest, 2, read, count, group, width, scale, own, room, to, width); break;
                default: attend(from, along_rest, 3, read, count, group, width, scale, own, room, to, width);
                }
            }
        }
    }
    free(stretches);
    return 0;
}

/* queries and keys [rows, heads, width], `along` floats a row, turned by the angles [rows, width / 2]; in place */
void rotate(float *states, int64_t rows, int64_t along, int64_t heads, int64_t width, const float *cosine,
            const float *sine) {
    int64_t half = width / 2;
#pragma omp parallel for schedule(static) if (rows * heads * width > MOVES)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < heads; head++) {
            float *low = states + row * along + head * width, *high = low + half;
            const float *c = cosine + row * half, *s = sine + row * half;
            for (int64_t place = 0; place < half; place++) {
                float a = low[place], b = high[place];
                low[place] = a * c[place] - b * s[place];
                high[place] = b * c[place] + a * s[place];
            }
        }
}
