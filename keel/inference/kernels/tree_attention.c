/* Attention over a prefix tree, forward and backward.

   Tokens are in depth-first order; query q sees key k when k <= q < end[k]. A row is a token with one of the query
   heads that read the same key head. Rows are numbered token by token and divided into panels of ROWS. All keys that
   any row of a panel may see are the ancestors of the panel's first token, that token, and the other tokens of the
   panel. They are gathered by following parents up the tree. In this order, the first `num_unmasked` keys are seen by
   every row of the panel, so only the keys after them are masked. Scores are stored as [key, row]: rows are the lanes
   of vectors, the softmax runs down the columns, and neither keys nor values are transposed.

   Consecutive panels form a part. A part copies its keys and values next to each other, and in the backward pass has
   its own sums of their gradients; the sums of the parts are added in a fixed order. So no result depends on the number
   of threads.

   Scores and `lse`, the logarithm of the sum of exponentials of each row, have base 2. A masked pair has probability
   zero, but is multiplied along with the others. Where that would spread a value that is not finite to rows that do not
   see it (0 * infinity is NaN), pairs are processed one by one. */
#include "simd.h"

#define ROWS 48
#define VECTORS (ROWS / LANES)
#define STRIP (3 * LANES) /* rows whose scores are computed together, for KEY_BLOCK keys */
#define KEY_BLOCK 4
#define GROUP 6 /* rows, or keys, that are summed together, TWO_VECTORS floats of each */
#define TWO_VECTORS (2 * LANES)
#define KEYS_FORWARD 96 /* keys per iteration: their scores stay in the L1 cache */
#define KEYS_BACKWARD 48

/* a tensor [heads, tokens, width] with unit stride along the width */
typedef struct {
    float *data;
    int64_t head_stride, token_stride; /* in floats */
} View;

/* The arguments of tree_forward and tree_backward; keel/inference/kernels/tree_attention.py has the same struct. */
typedef struct {
    int64_t size;      /* tokens */
    int64_t heads;     /* query heads, a multiple of key_heads */
    int64_t key_heads;
    int64_t width;     /* of a head, a multiple of 8 from 16 on */
    int64_t parts;
    int64_t threads;   /* the largest number of threads to use */
    const int32_t *end, *position;       /* [size] one past the last descendant; number of ancestors */
    const int32_t *run_start;            /* [size] first token of the run (each the child of the one before) up to it */
    const int32_t *run_parent;           /* [size] parent of a token that starts a run, -1 for a root */
    const int64_t *panel_start;          /* [parts + 1] first panel of each part */
    const int64_t *key_start;            /* [parts + 1] number of keys of all parts before it */
    const int64_t *first_token;          /* [parts] first token of a part */
    const int64_t *last_token;           /* [parts] one past the last token of a part */
    View query, key, value;              /* read; key and value have key_heads heads */
    View out;                            /* written by tree_forward, read by tree_backward */
    View d_out;                          /* read by tree_backward only */
    View d_query, d_key, d_value;        /* written by tree_backward only */
    float *lse;                          /* [key_heads, size * heads / key_heads] written forward, read backward */
    float *kv_grads;                     /* overwritten by tree_backward only: [key_heads, 2 (of key, of value),
                                            key_start[parts], tree_row_stride(width)] */
    float *scratch;                      /* overwritten: [threads, scratch_size] */
    int64_t scratch_size;                /* at least tree_scratch_size(most keys of a part, width) */
    float scale;                         /* of scores */
} Call;

/* Consecutive panels: the tokens of their rows, and all keys that these see. */
typedef struct {
    int64_t first_token, last_token;  /* the last one exclusive */
    int64_t num_keys, num_ancestors;  /* the keys are the ancestors of the first token, then the tokens */
    int all_finite;                   /* whether all keys and values are finite */
} Part;

/* the working memory of a thread */
typedef struct {
    float *keys, *values;            /* of the part: [num_keys, row stride] */
    float *query_t, *d_out_t;        /* of the panel, transposed: [strips, width, STRIP] */
    float *query, *d_out, *result;   /* of the panel: [ROWS, row stride] */
    float *probs, *d_scores;         /* [keys per iteration, ROWS] */
    float *lse, *delta;              /* [ROWS]; delta is the dot product of out and d_out */
    int32_t *row_token;              /* [ROWS] token of each row, or -1 */
    int32_t *key_token, *key_offset; /* of each key of the panel: its token, and its offset in `keys`, in floats */
} Scratch;

/* the rows of one panel and the keys that they may see */
typedef struct {
    int64_t first_row, rows;
    int64_t num_keys;
    int64_t num_unmasked;   /* the first keys, which all rows see */
    int64_t first_row_keys; /* the first keys, up to the token of the first row */
    int all_finite;         /* whether the copied rows and all keys and values of the part are finite */
} Panel;

/* Floats from one row to the next in scratch: an odd number of cache lines, so that rows do not all map to the same
   sets of the cache. */
INLINE int64_t padded(int64_t width) { return ((width + 15) / 16 | 1) * 16; }

/* Return the number of rows in a panel. */
int64_t tree_panel_rows(void) { return ROWS; }

/* Return the floats of scratch that a thread needs if no part has more than `keys` keys. */
int64_t tree_scratch_size(int64_t keys, int64_t width) {
    int64_t stride = padded(width), list = (keys + ROWS + 15) / 16 * 16;
    return 2 * keys * stride + 2 * ROWS * width + 3 * ROWS * stride + 2 * KEYS_FORWARD * ROWS + 3 * ROWS + 2 * list;
}

/* Return the floats from one key to the next in Call.kv_grads. */
int64_t tree_row_stride(int64_t width) { return padded(width); }

/* Lay out the scratch of a thread, if no part has more than `keys` keys; as tree_scratch_size counts. */
static Scratch thread_scratch(const Call *call, int64_t thread, int64_t keys) {
    int64_t width = call->width, stride = padded(width), list = (keys + ROWS + 15) / 16 * 16;
    float *next = call->scratch + thread * call->scratch_size;
    Scratch scratch;
    scratch.keys = next, next += keys * stride;
    scratch.values = next, next += keys * stride;
    scratch.query_t = next, next += ROWS * width;
    scratch.d_out_t = next, next += ROWS * width;
    scratch.query = next, next += ROWS * stride;
    scratch.d_out = next, next += ROWS * stride;
    scratch.result = next, next += ROWS * stride;
    scratch.probs = next, next += KEYS_FORWARD * ROWS;
    scratch.d_scores = next, next += KEYS_FORWARD * ROWS;
    scratch.lse = next, next += ROWS;
    scratch.delta = next, next += ROWS;
    scratch.row_token = (int32_t *)next, next += ROWS;
    scratch.key_token = (int32_t *)next, next += list;
    scratch.key_offset = (int32_t *)next;
    return scratch;
}

/* 2^x for x up to 127, to about one unit in the last place; 0 below -126, NaN for NaN */
INLINE vec vexp2(vec x) {
    const float middle = 12582912.0f + 127.0f; /* adding it leaves the nearest integer in the low bits */
    vec shifted = x + middle;
    vec remainder = x - (shifted - middle);
    vec power = broadcast(1.5345809509e-4f);
    power = power * remainder + 1.3399931200e-3f;
    power = power * remainder + 9.6184889664e-3f;
    power = power * remainder + 5.5503287770e-2f;
    power = power * remainder + 2.4022646891e-1f;
    power = power * remainder + 6.9314720574e-1f;
    power = power * remainder + 1.0f;
    vec scaled = power * (vec)((ivec)shifted << 23);
    return (vec)((ivec)scaled & ~(x < broadcast(-126.0f)));
}

/* the larger value in each lane; `b` if either is NaN */
INLINE vec vmax(vec a, vec b) {
    vec result;
    for (int lane = 0; lane < LANES; lane++) result[lane] = a[lane] > b[lane] ? a[lane] : b[lane];
    return result;
}

/* to = factor * transpose of from, both LANES by LANES with these row strides */
INLINE void transpose(const float *from, int64_t from_stride, float factor, float *to, int64_t to_stride) {
#if LANES == 8
    vec a[8], b[8];
    const ivec low = {0, 8, 1, 9, 4, 12, 5, 13}, high = {2, 10, 3, 11, 6, 14, 7, 15};
    const ivec even = {0, 1, 8, 9, 4, 5, 12, 13}, odd = {2, 3, 10, 11, 6, 7, 14, 15};
    const ivec left = {0, 1, 2, 3, 8, 9, 10, 11}, right = {4, 5, 6, 7, 12, 13, 14, 15};
    for (int i = 0; i < 8; i++) a[i] = load(from + i * from_stride) * factor;
    for (int i = 0; i < 8; i += 2) {
        b[i] = __builtin_shuffle(a[i], a[i + 1], low);
        b[i + 1] = __builtin_shuffle(a[i], a[i + 1], high);
    }
    for (int i = 0; i < 8; i += 4) {
        a[i] = __builtin_shuffle(b[i], b[i + 2], even);
        a[i + 1] = __builtin_shuffle(b[i], b[i + 2], odd);
        a[i + 2] = __builtin_shuffle(b[i + 1], b[i + 3], even);
        a[i + 3] = __builtin_shuffle(b[i + 1], b[i + 3], odd);
    }
    for (int i = 0; i < 4; i++) {
        store(to + i * to_stride, __builtin_shuffle(a[i], a[i + 4], left));
        store(to + (i + 4) * to_stride, __builtin_shuffle(a[i], a[i + 4], right));
    }
#else
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < LANES; j++) to[j * to_stride + i] = from[i * from_stride + j] * factor;
#endif
}

/* Rearrange [ROWS, row stride] as [strips, width, STRIP], multiplied by `factor`. */
static void transpose_panel(const float *from, int64_t width, float factor, float *to) {
    int64_t stride = padded(width);
    for (int64_t row = 0; row < ROWS; row += LANES)
        for (int64_t column = 0; column < width; column += LANES)
            transpose(from + row * stride + column, stride, factor,
                      to + row / STRIP * STRIP * width + column * STRIP + row % STRIP, STRIP);
}

/* Write the dot products of KEY_BLOCK keys with the rows of a strip to to[key * ROWS + row]. If `count` is less than
   KEY_BLOCK, the last key is used for the missing ones. */
INLINE void dot_keys(const float *rows_t, const float *keys, const int32_t *key_offset, int64_t count, int64_t width,
                     float *to) {
    const float *from[KEY_BLOCK];
    for (int key = 0; key < KEY_BLOCK; key++) from[key] = keys + key_offset[min_i64(key, count - 1)];
    vec total[KEY_BLOCK][3] = {{{0}}};
    for (int64_t i = 0; i < width; i++, rows_t += STRIP) {
        vec x = load(rows_t), y = load(rows_t + LANES), z = load(rows_t + 2 * LANES);
        KEEP_IN_REGISTER(x);
        KEEP_IN_REGISTER(y);
        KEEP_IN_REGISTER(z);
        for (int key = 0; key < KEY_BLOCK; key++) {
            vec factor = broadcast(from[key][i]);
            total[key][0] += factor * x;
            total[key][1] += factor * y;
            total[key][2] += factor * z;
        }
    }
    for (int key = 0; key < KEY_BLOCK; key++)
        for (int part = 0; part < 3; part++) store(to + key * ROWS + part * LANES, total[key][part]);
}

/* Return whether any of the rows `low` to `high` of the panel that starts at `first_row` may see one of these keys,
   which come after the unmasked ones. */
INLINE int any_visible(const Call *call, const int32_t *key_token, int64_t count, int64_t first_row, int64_t low,
                       int64_t high) {
    int64_t group_size = call->heads / call->key_heads;
    for (int64_t key = 0; key < count; key++)
        if (key_token[key] * group_size < first_row + high && call->end[key_token[key]] * group_size > first_row + low)
            return 1;
    return 0;
}

/* Write the scores [count, ROWS] of the keys from `first` on. Blocks that no row of a strip sees are left unchanged. */
static void compute_scores(const Call *call, const Scratch *scratch, const Panel *panel, const float *rows_t,
                           const float *keys, int64_t first, int64_t count, float *to) {
    int64_t width = call->width;
    for (int64_t strip = 0; strip < panel->rows; strip += STRIP)
        for (int64_t key = 0; key < count; key += KEY_BLOCK) {
            int64_t block = min_i64(KEY_BLOCK, count - key), index = first + key;
            if (index >= panel->num_unmasked &&
                !any_visible(call, scratch->key_token + index, block, panel->first_row, strip, strip + STRIP))
                continue;
            dot_keys(rows_t + strip * width, keys, scratch->key_offset + index, block, width,
                     to + key * ROWS + strip);
        }
}

/* to[row] += sum over keys of weights[key, row] * values[key], for GROUP rows and `vectors` vectors of the width */
INLINE void weighted_sum_group(const float *weights, const float *values, const int32_t *key_offset, int64_t count,
                               float *to, int64_t stride, const int vectors) {
    vec total[GROUP][2];
    for (int row = 0; row < GROUP; row++)
        for (int part = 0; part < vectors; part++) total[row][part] = load(to + row * stride + part * LANES);
    for (int64_t key = 0; key < count; key++) {
        const float *from = values + key_offset[key];
        vec x = load(from), y = vectors > 1 ? load(from + LANES) : x;
        KEEP_IN_REGISTER(x);
        KEEP_IN_REGISTER(y);
        for (int row = 0; row < GROUP; row++) {
            vec weight = broadcast(weights[key * ROWS + row]);
            total[row][0] += weight * x;
            if (vectors > 1) total[row][1] += weight * y;
        }
    }
    for (int row = 0; row < GROUP; row++)
        for (int part = 0; part < vectors; part++) store(to + row * stride + part * LANES, total[row][part]);
}

/* Return how many of `count` keys from `first` on may be multiplied with all rows of the panel, by a weight of zero
   where a row does not see the key: all if everything is finite, else those that every row sees. */
INLINE int64_t unmasked_count(const Panel *panel, int64_t first, int64_t count) {
    return panel->all_finite ? count : max_i64(0, min_i64(count, panel->num_unmasked - first));
}

/* to += factor * from */
INLINE void add_scaled(float *to, float factor, const float *from, int64_t width) {
    for (int64_t i = 0; i < width; i += LANES) store(to + i, load(to + i) + factor * load(from + i));
}

/* to[row] += sum over keys of weights[key, row] * values[key]. Most keys that no row of a group sees are skipped. */
static void weighted_sum(const Call *call, const Scratch *scratch, const Panel *panel, const float *weights,
                         const float *values, int64_t first, int64_t count, float *to) {
    int64_t width = call->width, stride = padded(width), unmasked = unmasked_count(panel, first, count);
    int64_t bounds[ROWS / GROUP][4];
    for (int64_t row = 0; row < panel->rows; row += GROUP) {
        /* A group sees the beginning of the keys of the panel's first row, and those tokens of the panel that do not
           come after the group: two ranges of keys, as [begin, end, begin, end]. */
        int64_t last = scratch->row_token[min_i64(row + GROUP, panel->rows) - 1], visible = panel->num_unmasked;
        int64_t *range = bounds[row / GROUP];
        while (visible < panel->first_row_keys &&
               call->end[scratch->key_token[visible]] > scratch->row_token[row])
            visible++;
        range[0] = 0, range[1] = visible, range[2] = panel->first_row_keys;
        range[3] = panel->first_row_keys + last - scratch->row_token[0];
        if (visible == panel->first_row_keys) range[1] = range[3], range[2] = range[3];
        for (int i = 0; i < 4; i++) range[i] = max_i64(0, min_i64(range[i] - first, unmasked));
    }
    for (int64_t column = 0; column < width; column += TWO_VECTORS)
        for (int64_t row = 0; row < panel->rows; row += GROUP)
            for (int range = 0; range < 4; range += 2) {
                int64_t begin = bounds[row / GROUP][range], keys = bounds[row / GROUP][range + 1] - begin;
                const float *group_weights = weights + begin * ROWS + row;
                const int32_t *key_offset = scratch->key_offset + first + begin;
                float *group_to = to + row * stride + column;
                if (keys <= 0) continue;
                if (column + TWO_VECTORS <= width)
                    weighted_sum_group(group_weights, values + column, key_offset, keys, group_to, stride, 2);
                else
                    weighted_sum_group(group_weights, values + column, key_offset, keys, group_to, stride, 1);
            }
    for (int64_t key = unmasked; key < count; key++) {
        int32_t token = scratch->key_token[first + key], end = call->end[token];
        for (int64_t row = 0; row < panel->rows; row++)
            if (scratch->row_token[row] >= token && scratch->row_token[row] < end)
                add_scaled(to + row * stride, weights[key * ROWS + row], values + scratch->key_offset[first + key],
                           width);
    }
}

/* to[key] += sum over the rows low to high of weights[key, row] * rows[row], for `keys` keys and `vectors` vectors of
   the width */
INLINE void accumulate_kv_grad_group(const float *weights, const float *rows, int64_t low, int64_t high,
                                     const int32_t *key_offset, float *to, int64_t stride, const int keys,
                                     const int vectors) {
    vec total[GROUP][2];
    for (int key = 0; key < keys; key++)
        for (int part = 0; part < vectors; part++) total[key][part] = load(to + key_offset[key] + part * LANES);
    for (int64_t row = low; row < high; row++) {
        const float *from = rows + row * stride;
        vec x = load(from), y = vectors > 1 ? load(from + LANES) : x;
        KEEP_IN_REGISTER(x);
        KEEP_IN_REGISTER(y);
        for (int key = 0; key < keys; key++) {
            vec weight = broadcast(weights[key * ROWS + row]);
            total[key][0] += weight * x;
            if (vectors > 1) total[key][1] += weight * y;
        }
    }
    for (int key = 0; key < keys; key++)
        for (int part = 0; part < vectors; part++) store(to + key_offset[key] + part * LANES, total[key][part]);
}

/* accumulate_kv_grad_group with the number of keys as a constant, so that the compiler keeps the sums in registers */
INLINE void accumulate_kv_grad_block(const float *weights, const float *rows, int64_t low, int64_t high,
                                     const int32_t *key_offset, float *to, int64_t stride, int64_t keys,
                                     const int vectors) {
    switch (keys) {
    case 6: accumulate_kv_grad_group(weights, rows, low, high, key_offset, to, stride, 6, vectors); break;
    case 5: accumulate_kv_grad_group(weights, rows, low, high, key_offset, to, stride, 5, vectors); break;
    case 4: accumulate_kv_grad_group(weights, rows, low, high, key_offset, to, stride, 4, vectors); break;
    case 3: accumulate_kv_grad_group(weights, rows, low, high, key_offset, to, stride, 3, vectors); break;
    case 2: accumulate_kv_grad_group(weights, rows, low, high, key_offset, to, stride, 2, vectors); break;
    default: accumulate_kv_grad_group(weights, rows, low, high, key_offset, to, stride, 1, vectors);
    }
}

/* to[key] += sum over rows of weights[key, row] * rows[row]. Most rows that see no key of a group are skipped. */
static void accumulate_kv_grad(const Call *call, const Scratch *scratch, const Panel *panel, const float *weights,
                               const float *rows, int64_t first, int64_t count, float *to) {
    int64_t width = call->width, stride = padded(width), group_size = call->heads / call->key_heads;
    int64_t unmasked = unmasked_count(panel, first, count);
    for (int64_t key = 0; key < unmasked; key += GROUP) {
        int64_t keys = min_i64(GROUP, unmasked - key), low = 0, high = panel->rows;
        const int32_t *token = scratch->key_token + first + key, *key_offset = scratch->key_offset + first + key;
        if (first + key + keys > panel->num_unmasked) {
            int32_t end = 0;
            for (int64_t i = 0; i < keys; i++) end = (int32_t)max_i64(end, call->end[token[i]]);
            low = max_i64(low, token[0] * group_size - panel->first_row);
            high = min_i64(high, end * group_size - panel->first_row);
        }
        const float *group_weights = weights + key * ROWS;
        int64_t column = 0;
        for (; column + TWO_VECTORS <= width; column += TWO_VECTORS)
            accumulate_kv_grad_block(group_weights, rows + column, low, high, key_offset, to + column, stride, keys, 2);
        if (column < width)
            accumulate_kv_grad_block(group_weights, rows + column, low, high, key_offset, to + column, stride, keys, 1);
    }
    for (int64_t key = unmasked; key < count; key++) {
        int32_t token = scratch->key_token[first + key], end = call->end[token];
        for (int64_t row = 0; row < panel->rows; row++)
            if (scratch->row_token[row] >= token && scratch->row_token[row] < end)
                add_scaled(to + scratch->key_offset[first + key], weights[key * ROWS + row], rows + row * stride,
                           width);
    }
}

/* zero where a value is finite, NaN where it is not */
INLINE vec finite_test(vec value) { return value * 0.0f; }

/* Return whether all values whose finite_test was added to `total` are finite. */
INLINE int is_finite_total(vec total) {
    float sum = sum_lanes(total);
    return sum == sum;
}

/* Return a part by its number; `all_finite` is set by copy_keys. */
static Part get_part(const Call *call, int64_t number) {
    Part part = {.first_token = call->first_token[number], .last_token = call->last_token[number]};
    part.num_ancestors = call->position[part.first_token];
    part.num_keys = part.num_ancestors + part.last_token - part.first_token;
    return part;
}

/* Write the ancestors of a token and the token itself to `to`, from the root down, and return how many they are. */
static int64_t gather_ancestors(const Call *call, int64_t token, int32_t *to) {
    int64_t count = call->position[token] + 1, index = count;
    while (index > 0) {
        int64_t start = call->run_start[token];
        for (int64_t k = token; k >= start; k--) to[--index] = (int32_t)k;
        token = call->run_parent[start];
    }
    return count;
}

/* Copy the keys and values of a part to scratch and set part->all_finite. Overwrites scratch->key_token. */
static void copy_keys(const Call *call, const Scratch *scratch, Part *part, int64_t head) {
    int64_t width = call->width, stride = padded(width);
    vec test = {0};
    gather_ancestors(call, part->first_token, scratch->key_token);
    for (int64_t i = 0; i < part->num_keys; i++) {
        int64_t token = i < part->num_ancestors ? scratch->key_token[i] : part->first_token + i - part->num_ancestors;
        const float *key = call->key.data + head * call->key.head_stride + token * call->key.token_stride;
        const float *value = call->value.data + head * call->value.head_stride + token * call->value.token_stride;
        for (int64_t column = 0; column < width; column += LANES) {
            vec k = load(key + column), v = load(value + column);
            test += finite_test(k) + finite_test(v);
            store(scratch->keys + i * stride + column, k);
            store(scratch->values + i * stride + column, v);
        }
    }
    part->all_finite = is_finite_total(test);
}

/* Return a panel by its number, and write its keys and rows to scratch: key_token, key_offset and row_token. */
static Panel get_panel(const Call *call, const Scratch *scratch, const Part *part, int64_t number) {
    int64_t group_size = call->heads / call->key_heads, stride = padded(call->width);
    Panel panel;
    panel.first_row = number * ROWS;
    panel.rows = min_i64(ROWS, call->size * group_size - panel.first_row);
    panel.all_finite = part->all_finite;
    int64_t first = panel.first_row / group_size, last = (panel.first_row + panel.rows - 1) / group_size + 1;
    panel.first_row_keys = gather_ancestors(call, first, scratch->key_token);
    panel.num_keys = panel.first_row_keys + last - first - 1;
    for (int64_t token = first + 1; token < last; token++)
        scratch->key_token[panel.first_row_keys + token - first - 1] = (int32_t)token;
    panel.num_unmasked = panel.first_row_keys;
    while (panel.num_unmasked && call->end[scratch->key_token[panel.num_unmasked - 1]] < last) panel.num_unmasked--;
    for (int64_t key = 0; key < panel.num_keys; key++) {
        int64_t token = scratch->key_token[key];
        int64_t index = token < part->first_token ? key : part->num_ancestors + token - part->first_token;
        scratch->key_offset[key] = (int32_t)(index * stride);
    }
    int64_t head = panel.first_row % group_size, token = first;
    for (int64_t row = 0; row < ROWS; row++) {
        scratch->row_token[row] = row < panel.rows ? (int32_t)token : -1;
        if (++head == group_size) head = 0, token++;
    }
    return panel;
}

/* Return the address of a row of a panel in a tensor of all query heads. */
INLINE float *row_address(const Call *call, const Scratch *scratch, const View *view, int64_t head, const Panel *panel,
                          int64_t row) {
    int64_t group_size = call->heads / call->key_heads, token = scratch->row_token[row];
    int64_t query_head = head * group_size + panel->first_row + row - token * group_size;
    return view->data + query_head * view->head_stride + token * view->token_stride;
}

/* Copy the rows of a panel to `to` [ROWS, row stride], times `factor`, with zeros after the last row. Clears
   panel->all_finite if a value is not finite. */
static void copy_rows(const Call *call, const Scratch *scratch, const View *view, int64_t head, Panel *panel,
                      float factor, float *to) {
    int64_t width = call->width, stride = padded(width);
    vec test = {0};
    for (int64_t row = 0; row < panel->rows; row++) {
        const float *from = row_address(call, scratch, view, head, panel, row);
        for (int64_t column = 0; column < width; column += LANES) {
            vec value = load(from + column) * factor;
            test += finite_test(value);
            store(to + row * stride + column, value);
        }
    }
    memset(to + panel->rows * stride, 0, 4 * (ROWS - panel->rows) * stride);
    panel->all_finite &= is_finite_total(test);
}

/* Return which rows of a vector of rows see the token. */
INLINE ivec visible_rows(const Scratch *scratch, int vector, int32_t token, int32_t end) {
    ivec row_token = *(const ivec *)(scratch->row_token + vector * LANES);
    return (row_token >= token) & (row_token < end);
}

/* Set the scores of pairs that are not visible to -infinity, for `count` keys from `first` on. */
static void mask(const Call *call, const Scratch *scratch, int64_t first, int64_t count, float *scores) {
    for (int64_t key = 0; key < count; key++) {
        int32_t token = scratch->key_token[first + key], end = call->end[token];
        for (int vector = 0; vector < VECTORS; vector++) {
            float *score = scores + key * ROWS + vector * LANES;
            store(score, blend(visible_rows(scratch, vector, token, end), load(score), broadcast(-INFINITY)));
        }
    }
}

/* One step of the online softmax: replace scores by 2^(score - max), where max is the largest score of the row so far.
   Updates `max` and `total`, the sum of each row, and writes to `rescale` the factor for what was summed before. */
static void online_softmax(float *scores, int64_t count, vec *max, vec *total, vec *rescale) {
    for (int half = 0; half < VECTORS; half += 3) {
        vec old_max[3], new_max[3], sums[3];
        for (int i = 0; i < 3; i++) new_max[i] = old_max[i] = max[half + i];
        for (int64_t key = 0; key < count; key++)
            for (int i = 0; i < 3; i++)
                new_max[i] = vmax(load(scores + key * ROWS + (half + i) * LANES), new_max[i]);
        for (int i = 0; i < 3; i++) {
            rescale[half + i] = vexp2(old_max[i] - new_max[i]);
            sums[i] = total[half + i] * rescale[half + i];
            max[half + i] = new_max[i];
        }
        for (int64_t key = 0; key < count; key++)
            for (int i = 0; i < 3; i++) {
                float *score = scores + key * ROWS + (half + i) * LANES;
                vec weight = vexp2(load(score) - new_max[i]);
                sums[i] += weight;
                store(score, weight);
            }
        for (int i = 0; i < 3; i++) total[half + i] = sums[i];
    }
}

/* Compute out and lse of the rows of a panel, KEYS_FORWARD keys at a time. */
static void forward_panel(const Call *call, const Scratch *scratch, const Part *part, int64_t head, int64_t number) {
    int64_t width = call->width, stride = padded(width), group_size = call->heads / call->key_heads;
    Panel panel = get_panel(call, scratch, part, number);
    copy_rows(call, scratch, &call->query, head, &panel, call->scale, scratch->query);
    transpose_panel(scratch->query, width, 1.44269504f, scratch->query_t); /* log2(e): scores have base 2 */
    memset(scratch->result, 0, 4 * ROWS * stride);
    vec max[VECTORS], total[VECTORS], rescale[VECTORS];
    /* The lowest finite float, not -infinity: a row may see none of the first keys, and -infinity minus -infinity is
       NaN. */
    for (int i = 0; i < VECTORS; i++) max[i] = broadcast(-3.4028235e38f), total[i] = broadcast(0.0f);
    for (int64_t first = 0; first < panel.num_keys; first += KEYS_FORWARD) {
        int64_t count = min_i64(KEYS_FORWARD, panel.num_keys - first);
        int64_t unmasked = min_i64(count, max_i64(0, panel.num_unmasked - first));
        compute_scores(call, scratch, &panel, scratch->query_t, scratch->keys, first, count, scratch->probs);
        mask(call, scratch, first + unmasked, count - unmasked, scratch->probs + unmasked * ROWS);
        online_softmax(scratch->probs, count, max, total, rescale);
        for (int64_t row = 0; first && row < panel.rows; row++) {
            float factor = ((float *)rescale)[row];
            if (factor == 1.0f) continue;
            for (int64_t column = 0; column < width; column += LANES)
                store(scratch->result + row * stride + column, load(scratch->result + row * stride + column) * factor);
        }
        weighted_sum(call, scratch, &panel, scratch->probs, scratch->values, first, count, scratch->result);
    }
    float *lse = call->lse + head * call->size * group_size + panel.first_row;
    for (int64_t row = 0; row < panel.rows; row++) {
        float sum = ((float *)total)[row], factor = 1.0f / sum;
        float *to = row_address(call, scratch, &call->out, head, &panel, row);
        lse[row] = ((float *)max)[row] + log2f(sum);
        for (int64_t column = 0; column < width; column += LANES)
            store(to + column, load(scratch->result + row * stride + column) * factor);
    }
}

/* Backward of the softmax for `count` keys from `first` on, the first `unmasked` of which every row sees. Replaces
   scores by probabilities p = 2^(score - lse), and dp in scratch->d_scores by the gradient of scores, p * (dp - delta).
   Both become zero where a pair is not visible. */
static void softmax_backward(const Call *call, const Scratch *scratch, int64_t first, int64_t count,
                             int64_t unmasked) {
    for (int64_t key = 0; key < count; key++) {
        int32_t token = scratch->key_token[first + key], end = call->end[token];
        for (int vector = 0; vector < VECTORS; vector++) {
            int64_t index = key * ROWS + vector * LANES;
            vec prob = vexp2(load(scratch->probs + index) - load(scratch->lse + vector * LANES));
            vec d_score = prob * (load(scratch->d_scores + index) - load(scratch->delta + vector * LANES));
            if (key >= unmasked) {
                ivec visible = visible_rows(scratch, vector, token, end);
                prob = (vec)((ivec)prob & visible), d_score = (vec)((ivec)d_score & visible);
            }
            store(scratch->probs + index, prob);
            store(scratch->d_scores + index, d_score);
        }
    }
}

/* Compute d_query of the rows of a panel and add their contribution to d_keys and d_values, the sums of the part. The
   probabilities are computed again from the scores and lse. */
static void backward_panel(const Call *call, const Scratch *scratch, const Part *part, int64_t head, int64_t number,
                           float *d_keys, float *d_values) {
    int64_t width = call->width, stride = padded(width), group_size = call->heads / call->key_heads;
    Panel panel = get_panel(call, scratch, part, number);
    copy_rows(call, scratch, &call->query, head, &panel, call->scale, scratch->query);
    transpose_panel(scratch->query, width, 1.44269504f, scratch->query_t); /* log2(e): scores have base 2 */
    copy_rows(call, scratch, &call->d_out, head, &panel, 1.0f, scratch->d_out);
    transpose_panel(scratch->d_out, width, 1.0f, scratch->d_out_t);
    memset(scratch->result, 0, 4 * ROWS * stride);
    const float *lse = call->lse + head * call->size * group_size + panel.first_row;
    for (int64_t row = 0; row < ROWS; row++) {
        scratch->lse[row] = row < panel.rows ? lse[row] : INFINITY; /* probabilities of zero after the last row */
        scratch->delta[row] = 0.0f;
        if (row >= panel.rows) continue;
        const float *out = row_address(call, scratch, &call->out, head, &panel, row);
        vec total = {0};
        for (int64_t column = 0; column < width; column += LANES)
            total += load(out + column) * load(scratch->d_out + row * stride + column);
        scratch->delta[row] = sum_lanes(total);
    }
    for (int64_t first = 0; first < panel.num_keys; first += KEYS_BACKWARD) {
        int64_t count = min_i64(KEYS_BACKWARD, panel.num_keys - first);
        int64_t unmasked = min_i64(count, max_i64(0, panel.num_unmasked - first));
        compute_scores(call, scratch, &panel, scratch->query_t, scratch->keys, first, count, scratch->probs);
        compute_scores(call, scratch, &panel, scratch->d_out_t, scratch->values, first, count, scratch->d_scores);
        softmax_backward(call, scratch, first, count, unmasked);
        accumulate_kv_grad(call, scratch, &panel, scratch->probs, scratch->d_out, first, count, d_values);
        accumulate_kv_grad(call, scratch, &panel, scratch->d_scores, scratch->query, first, count, d_keys);
        weighted_sum(call, scratch, &panel, scratch->d_scores, scratch->keys, first, count, scratch->result);
    }
    for (int64_t row = 0; row < panel.rows; row++) {
        float *to = row_address(call, scratch, &call->d_query, head, &panel, row);
        for (int64_t column = 0; column < width; column += LANES)
            store(to + column, load(scratch->result + row * stride + column) * call->scale);
    }
}

/* Return the largest number of keys of any part. */
static int64_t max_part_keys(const Call *call) {
    int64_t keys = 0;
    for (int64_t part = 0; part < call->parts; part++)
        keys = max_i64(keys, call->key_start[part + 1] - call->key_start[part]);
    return keys;
}

/* Forward pass: write out = softmax(scale * query key) value over visible pairs, and lse. Call says which fields are
   read and written. */
void tree_forward(const Call *call) {
    int64_t keys = max_part_keys(call);
#pragma omp parallel num_threads((int)call->threads) if (call->size * call->heads * call->width > PARALLEL_COPIES)
    {
        Scratch scratch = thread_scratch(call, omp_get_thread_num(), keys);
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < call->parts * call->key_heads; item++) {
            int64_t number = item / call->key_heads, head = item % call->key_heads;
            Part part = get_part(call, number);
            copy_keys(call, &scratch, &part, head);
            for (int64_t panel = call->panel_start[number]; panel < call->panel_start[number + 1]; panel++)
                forward_panel(call, &scratch, &part, head, panel);
        }
    }
}

/* Write the gradient of a token's key or value: the sum over the part of the token and later parts that see it. */
static void reduce_kv_grad(const Call *call, int64_t head, int64_t token, const float *part_grads, const View *view) {
    int64_t width = call->width, stride = padded(width);
    float *to = view->data + head * view->head_stride + token * view->token_stride;
    int written = 0;
    for (int64_t number = 0; number < call->parts; number++) {
        Part part = get_part(call, number);
        if (token >= part.last_token) continue;
        if (part.first_token >= call->end[token]) break;
        int64_t key =
            token < part.first_token ? call->position[token] : part.num_ancestors + token - part.first_token;
        const float *from = part_grads + (call->key_start[number] + key) * stride;
        for (int64_t column = 0; column < width; column += LANES)
            if (written)
                store(to + column, load(to + column) + load(from + column));
            else
                store(to + column, load(from + column));
        written = 1;
    }
}

/* Backward pass: write d_query, d_key and d_value for d_out, the gradient of out, with the out and lse of tree_forward.
   Call says which fields are read and written. */
void tree_backward(const Call *call) {
    int64_t keys = max_part_keys(call), stride = padded(call->width), all_keys = call->key_start[call->parts];
#pragma omp parallel num_threads((int)call->threads) if (call->size * call->heads * call->width > PARALLEL_COPIES)
    {
        Scratch scratch = thread_scratch(call, omp_get_thread_num(), keys);
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < call->parts * call->key_heads; item++) {
            int64_t number = item / call->key_heads, head = item % call->key_heads;
            Part part = get_part(call, number);
            float *d_keys = call->kv_grads + (2 * head * all_keys + call->key_start[number]) * stride;
            float *d_values = d_keys + all_keys * stride;
            copy_keys(call, &scratch, &part, head);
            memset(d_keys, 0, 4 * part.num_keys * stride);
            memset(d_values, 0, 4 * part.num_keys * stride);
            for (int64_t panel = call->panel_start[number]; panel < call->panel_start[number + 1]; panel++)
                backward_panel(call, &scratch, &part, head, panel, d_keys, d_values);
        }
#pragma omp for schedule(static)
        for (int64_t item = 0; item < call->size * call->key_heads; item++) {
            int64_t head = item % call->key_heads, token = item / call->key_heads;
            const float *part_grads = call->kv_grads + 2 * head * all_keys * stride;
            reduce_kv_grad(call, head, token, part_grads, &call->d_key);
            reduce_kv_grad(call, head, token, part_grads + all_keys * stride, &call->d_value);
        }
    }
}
