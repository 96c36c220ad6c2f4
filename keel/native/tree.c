/* Attention over a prefix tree, forward and backward.

   The tokens stand in depth-first order; token k is seen by token q when k <= q < end[k]. A row is a token with one of
   the query heads that read the same key head; rows are numbered token by token and cut into panels of ROWS. What the
   first token of a panel sees, and the other tokens of the panel, are all the keys that any row of it may see. They are
   found by walking up the tree, and in this order they are seen by every row up to some place (`full`), so only what
   comes after it is masked. Scores lie as [key, row]: rows are the lanes of vectors, softmax goes down the columns, and
   neither keys nor values are ever turned.

   Neighbouring panels form a part. Its keys and values are copied side by side, and in the backward it sums up their
   gradients apart; the sums of parts are added in a fixed order. So no result depends on the number of threads.

   Scores are in units of log 2 throughout, and so is `norm`, the logarithm of each row's sum. A masked pair has a share
   of zero, and is multiplied with all others: where that would spread what is not finite, pairs go one by one. */
#include "common.h"

#define ROWS 48
#define VECTORS (ROWS / LANES)
#define STRIP (3 * LANES) /* rows whose scores are formed at once, for FEW keys */
#define FEW 4
#define GROUP 6 /* rows, or keys, that are summed up at once, PAIR numbers of each */
#define PAIR (2 * LANES)
#define KEYS_FORWARD 96 /* keys at a time: their scores stay in the first cache */
#define KEYS_BACKWARD 48

typedef struct {
    float *data;
    int64_t head, token; /* floats from one to the next; those of a head are side by side */
} View;

typedef struct {
    int64_t size, heads, key_heads, width, parts, threads;
    const int32_t *end, *position; /* of each token */
    const int32_t *start, *up;     /* the first of the run, each the child of the last, up to a token; its parent */
    const int64_t *bounds, *room;  /* of each part: its first panel; how many keys the parts before it have */
    const int64_t *first, *last;   /* of each part: its first token, and one past its last */
    View query, key, value, out, outer, d_query, d_key, d_value;
    float *norm;          /* [key heads, rows] */
    float *sums;          /* gradients in parts: [key heads, of key and of value, keys of all parts, wide] */
    float *scratch;
    int64_t scratch_size; /* for each thread */
    float scale;
} Call;

/* the tokens of a part, from its first panel's to its last's; it has room for them and for all that they see */
typedef struct {
    int64_t first, last, keys, above; /* those above are seen by the first, and come before it */
    int finite;
} Part;

/* what a thread works with */
typedef struct {
    float *keys, *values;          /* of the part: [keys, wide] */
    float *turned, *turned_outer;  /* of the panel: [strips, width, STRIP] */
    float *query, *outer, *result; /* of the panel: [ROWS, wide] */
    float *shares, *slopes;        /* [keys at a time, ROWS] */
    float *norm, *delta;           /* [ROWS] */
    int32_t *who;                  /* [ROWS] token of each row, or -1 */
    int32_t *token, *where;        /* of each key of the panel: its token, and where it stands in the part */
} Scratch;

/* rows of one panel, and the keys that they may see */
typedef struct {
    int64_t row, rows;        /* the first, and how many */
    int64_t keys, full, path; /* how many; how many all rows see; how many the first row sees */
    int finite;               /* also all keys and values of the part */
} Panel;

/* floats from one row to the next in scratch: an odd number of lines of the cache, so that not all rows collide */
INLINE int64_t stride(int64_t width) { return ((width + 15) / 16 | 1) * 16; }

int64_t tree_rows(void) { return ROWS; }

/* floats of scratch for each thread, when a part has so many keys */
int64_t tree_scratch(int64_t keys, int64_t width) {
    int64_t wide = stride(width), lists = (keys + ROWS + 15) / 16 * 16;
    return 2 * keys * wide + 2 * ROWS * width + 3 * ROWS * wide + 2 * KEYS_FORWARD * ROWS + 3 * ROWS + 2 * lists;
}

int64_t tree_stride(int64_t width) { return stride(width); }

/* a thread's own scratch, when the largest part has so many keys */
static Scratch scratch_of(const Call *call, int64_t thread, int64_t keys) {
    int64_t width = call->width, wide = stride(width), lists = (keys + ROWS + 15) / 16 * 16;
    float *next = call->scratch + thread * call->scratch_size;
    Scratch made;
    made.keys = next, next += keys * wide;
    made.values = next, next += keys * wide;
    made.turned = next, next += ROWS * width;
    made.turned_outer = next, next += ROWS * width;
    made.query = next, next += ROWS * wide;
    made.outer = next, next += ROWS * wide;
    made.result = next, next += ROWS * wide;
    made.shares = next, next += KEYS_FORWARD * ROWS;
    made.slopes = next, next += KEYS_FORWARD * ROWS;
    made.norm = next, next += ROWS;
    made.delta = next, next += ROWS;
    made.who = (int32_t *)next, next += ROWS;
    made.token = (int32_t *)next, next += lists;
    made.where = (int32_t *)next;
    return made;
}

/* 2^x for x that is not above 127, to about one unit in the last place; 0 far below, NaN of NaN */
INLINE vec power_of_two(vec x) {
    const float middle = 12582912.0f + 127.0f; /* added, it leaves the nearest whole number in the low bits */
    vec shifted = x + middle;
    vec rest = x - (shifted - middle);
    vec power = all(1.5345809509e-4f);
    power = power * rest + 1.3399931200e-3f;
    power = power * rest + 9.6184889664e-3f;
    power = power * rest + 5.5503287770e-2f;
    power = power * rest + 2.4022646891e-1f;
    power = power * rest + 6.9314720574e-1f;
    power = power * rest + 1.0f;
    vec scaled = power * (vec)((ivec)shifted << 23);
    return (vec)((ivec)scaled & ~(x < all(-126.0f)));
}

/* the larger of each two; `b` when one is NaN */
INLINE vec larger(vec a, vec b) {
    vec found;
    for (int lane = 0; lane < LANES; lane++) found[lane] = a[lane] > b[lane] ? a[lane] : b[lane];
    return found;
}

/* a square of LANES rows, turned and multiplied */
INLINE void turn(const float *from, int64_t along, float factor, float *to, int64_t apart) {
#if LANES == 8
    vec a[8], b[8];
    const ivec low = {0, 8, 1, 9, 4, 12, 5, 13}, high = {2, 10, 3, 11, 6, 14, 7, 15};
    const ivec even = {0, 1, 8, 9, 4, 5, 12, 13}, odd = {2, 3, 10, 11, 6, 7, 14, 15};
    const ivec left = {0, 1, 2, 3, 8, 9, 10, 11}, right = {4, 5, 6, 7, 12, 13, 14, 15};
    for (int i = 0; i < 8; i++) a[i] = load(from + i * along) * factor;
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
        store(to + i * apart, __builtin_shuffle(a[i], a[i + 4], left));
        store(to + (i + 4) * apart, __builtin_shuffle(a[i], a[i + 4], right));
    }
#else
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < LANES; j++) to[j * apart + i] = from[i * along + j] * factor;
#endif
}

/* [ROWS, wide] as [strips, width, STRIP] */
static void turn_panel(const float *from, int64_t width, float factor, float *to) {
    int64_t wide = stride(width);
    for (int64_t row = 0; row < ROWS; row += LANES)
        for (int64_t place = 0; place < width; place += LANES)
            turn(from + row * wide + place, wide, factor,
                 to + row / STRIP * STRIP * width + place * STRIP + row % STRIP, STRIP);
}

/* dots of FEW keys with the rows of a strip; when there are fewer, the last of them again */
INLINE void dots(const float *turned, const float *keys, const int32_t *where, int64_t count, int64_t width,
                 float *to) {
    const float *from[FEW];
    for (int key = 0; key < FEW; key++) from[key] = keys + where[least(key, count - 1)];
    vec found[FEW][3] = {{{0}}};
    for (int64_t place = 0; place < width; place++, turned += STRIP) {
        vec x = load(turned), y = load(turned + LANES), z = load(turned + 2 * LANES);
        HOLD(x);
        HOLD(y);
        HOLD(z);
        for (int key = 0; key < FEW; key++) {
            vec one = all(from[key][place]);
            found[key][0] += one * x;
            found[key][1] += one * y;
            found[key][2] += one * z;
        }
    }
    for (int key = 0; key < FEW; key++)
        for (int part = 0; part < 3; part++) store(to + key * ROWS + part * LANES, found[key][part]);
}

/* whether any row of a panel from `low` to `high` may see one of these keys; they are not `full` */
INLINE int any_sees(const Call *call, const int32_t *token, int64_t count, int64_t row, int64_t low, int64_t high) {
    int64_t each = call->heads / call->key_heads;
    for (int64_t key = 0; key < count; key++)
        if (token[key] * each < row + high && call->end[token[key]] * each > row + low) return 1;
    return 0;
}

/* scores [count, ROWS] of the keys first, first + 1, ...; what no row of a strip sees is left as it was */
static void scores(const Call *call, const Scratch *my, const Panel *panel, const float *turned, const float *keys,
                   int64_t first, int64_t count, float *to) {
    int64_t width = call->width;
    for (int64_t strip = 0; strip < panel->rows; strip += STRIP)
        for (int64_t key = 0; key < count; key += FEW) {
            int64_t few = least(FEW, count - key), place = first + key;
            if (place >= panel->full &&
                !any_sees(call, my->token + place, few, panel->row, strip, strip + STRIP))
                continue;
            dots(turned + strip * width, keys, my->where + place, few, width, to + key * ROWS + strip);
        }
}

/* to[row] += sum over keys of share[key, row] * values[key], for GROUP rows and so many vectors of the width */
INLINE void mix_group(const float *share, const float *values, const int32_t *where, int64_t count, float *to,
                      int64_t wide, const int vectors) {
    vec total[GROUP][2];
    for (int row = 0; row < GROUP; row++)
        for (int part = 0; part < vectors; part++) total[row][part] = load(to + row * wide + part * LANES);
    for (int64_t key = 0; key < count; key++) {
        const float *from = values + where[key];
        vec x = load(from), y = vectors > 1 ? load(from + LANES) : x;
        HOLD(x);
        HOLD(y);
        for (int row = 0; row < GROUP; row++) {
            vec one = all(share[key * ROWS + row]);
            total[row][0] += one * x;
            if (vectors > 1) total[row][1] += one * y;
        }
    }
    for (int row = 0; row < GROUP; row++)
        for (int part = 0; part < vectors; part++) store(to + row * wide + part * LANES, total[row][part]);
}

/* how many of these keys may be multiplied with rows that do not see them, by shares of zero */
INLINE int64_t careless(const Panel *panel, int64_t first, int64_t count) {
    return panel->finite ? count : most(0, least(count, panel->full - first));
}

/* to += factor * from */
INLINE void add(float *to, float factor, const float *from, int64_t width) {
    for (int64_t place = 0; place < width; place += LANES)
        store(to + place, load(to + place) + factor * load(from + place));
}

/* to[row] += sum over keys of share[key, row] * values[key]; keys that no row of a group sees are mostly left out */
static void mix(const Call *call, const Scratch *my, const Panel *panel, const float *share, const float *values,
                int64_t first, int64_t count, float *to) {
    int64_t width = call->width, wide = stride(width), quick = careless(panel, first, count);
    int64_t bounds[ROWS / GROUP][4];
    for (int64_t row = 0; row < panel->rows; row += GROUP) {
        /* a group sees the beginning of what the panel's first row sees, and of the panel what is not after it */
        int64_t last = my->who[least(row + GROUP, panel->rows) - 1], seen = panel->full, *here = bounds[row / GROUP];
        while (seen < panel->path && call->end[my->token[seen]] > my->who[row]) seen++;
        here[0] = 0, here[1] = seen, here[2] = panel->path, here[3] = panel->path + last - my->who[0];
        if (seen == panel->path) here[1] = here[3], here[2] = here[3];
        for (int i = 0; i < 4; i++) here[i] = most(0, least(here[i] - first, quick));
    }
    for (int64_t place = 0; place < width; place += PAIR)
        for (int64_t row = 0; row < panel->rows; row += GROUP)
            for (int range = 0; range < 4; range += 2) {
                int64_t from = bounds[row / GROUP][range], many = bounds[row / GROUP][range + 1] - from;
                const float *shares = share + from * ROWS + row;
                const int32_t *where = my->where + first + from;
                float *here = to + row * wide + place;
                if (many <= 0) continue;
                if (place + PAIR <= width)
                    mix_group(shares, values + place, where, many, here, wide, 2);
                else
                    mix_group(shares, values + place, where, many, here, wide, 1);
            }
    for (int64_t key = quick; key < count; key++) {
        int32_t token = my->token[first + key], end = call->end[token];
        for (int64_t row = 0; row < panel->rows; row++)
            if (my->who[row] >= token && my->who[row] < end)
                add(to + row * wide, share[key * ROWS + row], values + my->where[first + key], width);
    }
}

/* to[key] += sum over rows low..high of share[key, row] * rows[row], for so many keys and vectors of the width */
INLINE void spread_group(const float *share, const float *rows, int64_t low, int64_t high, const int32_t *where,
                         float *to, int64_t wide, const int keys, const int vectors) {
    vec total[GROUP][2];
    for (int key = 0; key < keys; key++)
        for (int part = 0; part < vectors; part++) total[key][part] = load(to + where[key] + part * LANES);
    for (int64_t row = low; row < high; row++) {
        const float *from = rows + row * wide;
        vec x = load(from), y = vectors > 1 ? load(from + LANES) : x;
        HOLD(x);
        HOLD(y);
        for (int key = 0; key < keys; key++) {
            vec one = all(share[key * ROWS + row]);
            total[key][0] += one * x;
            if (vectors > 1) total[key][1] += one * y;
        }
    }
    for (int key = 0; key < keys; key++)
        for (int part = 0; part < vectors; part++) store(to + where[key] + part * LANES, total[key][part]);
}

/* the same with the number of keys known to the compiler */
INLINE void spread_few(const float *share, const float *rows, int64_t low, int64_t high, const int32_t *where,
                       float *to, int64_t wide, int64_t keys, const int vectors) {
    switch (keys) {
    case 6: spread_group(share, rows, low, high, where, to, wide, 6, vectors); break;
    case 5: spread_group(share, rows, low, high, where, to, wide, 5, vectors); break;
    case 4: spread_group(share, rows, low, high, where, to, wide, 4, vectors); break;
    case 3: spread_group(share, rows, low, high, where, to, wide, 3, vectors); break;
    case 2: spread_group(share, rows, low, high, where, to, wide, 2, vectors); break;
    default: spread_group(share, rows, low, high, where, to, wide, 1, vectors);
    }
}

/* to[key] += sum over rows of share[key, row] * rows[row]; rows that see no key of a group are mostly left out */
static void spread(const Call *call, const Scratch *my, const Panel *panel, const float *share, const float *rows,
                   int64_t first, int64_t count, float *to) {
    int64_t width = call->width, wide = stride(width), each = call->heads / call->key_heads;
    int64_t quick = careless(panel, first, count);
    for (int64_t key = 0; key < quick; key += GROUP) {
        int64_t few = least(GROUP, quick - key), low = 0, high = panel->rows;
        const int32_t *token = my->token + first + key, *where = my->where + first + key;
        if (first + key + few > panel->full) {
            int32_t end = 0;
            for (int64_t one = 0; one < few; one++) end = (int32_t)most(end, call->end[token[one]]);
            low = most(low, token[0] * each - panel->row), high = least(high, end * each - panel->row);
        }
        int64_t place = 0;
        for (; place + PAIR <= width; place += PAIR)
            spread_few(share + key * ROWS, rows + place, low, high, where, to + place, wide, few, 2);
        if (place < width) spread_few(share + key * ROWS, rows + place, low, high, where, to + place, wide, few, 1);
    }
    for (int64_t key = quick; key < count; key++) {
        int32_t token = my->token[first + key], end = call->end[token];
        for (int64_t row = 0; row < panel->rows; row++)
            if (my->who[row] >= token && my->who[row] < end)
                add(to + my->where[first + key], share[key * ROWS + row], rows + row * wide, width);
    }
}

/* zeros, or NaN where something is not finite */
INLINE vec tested(vec value) { return value * 0.0f; }

/* whether all that was tested and added up is finite */
INLINE int passed(vec total) {
    float found = sum(total);
    return found == found;
}

/* a part by its number; its keys are not copied yet */
static Part part_of(const Call *call, int64_t number) {
    Part part = {.first = call->first[number], .last = call->last[number]};
    part.above = call->position[part.first];
    part.keys = part.above + part.last - part.first;
    return part;
}

/* all that a token sees, in their order; gives how many */
static int64_t walk(const Call *call, int64_t token, int32_t *to) {
    int64_t count = call->position[token] + 1, place = count;
    while (place > 0) {
        int64_t start = call->start[token];
        for (int64_t k = token; k >= start; k--) to[--place] = (int32_t)k;
        token = call->up[start];
    }
    return count;
}

/* the keys of a part and their values, side by side */
static void copy_keys(const Call *call, const Scratch *my, Part *part, int64_t head) {
    int64_t width = call->width, wide = stride(width);
    vec test = {0};
    walk(call, part->first, my->token);
    for (int64_t key = 0; key < part->keys; key++) {
        int64_t token = key < part->above ? my->token[key] : part->first + key - part->above;
        const float *from = call->key.data + head * call->key.head + token * call->key.token;
        const float *value = call->value.data + head * call->value.head + token * call->value.token;
        for (int64_t place = 0; place < width; place += LANES) {
            vec one = load(from + place), other = load(value + place);
            test += tested(one) + tested(other);
            store(my->keys + key * wide + place, one);
            store(my->values + key * wide + place, other);
        }
    }
    part->finite = passed(test);
}

/* the rows of a panel and the keys that they may see: those of its first token, then its other tokens */
static Panel panel_of(const Call *call, const Scratch *my, const Part *part, int64_t number) {
    int64_t each = call->heads / call->key_heads, wide = stride(call->width);
    Panel panel;
    panel.row = number * ROWS;
    panel.rows = least(ROWS, call->size * each - panel.row);
    panel.finite = part->finite;
    int64_t first = panel.row / each, last = (panel.row + panel.rows - 1) / each + 1;
    panel.path = walk(call, first, my->token);
    panel.keys = panel.path + last - first - 1;
    for (int64_t token = first + 1; token < last; token++) my->token[panel.path + token - first - 1] = (int32_t)token;
    for (panel.full = panel.path; panel.full && call->end[my->token[panel.full - 1]] < last;) panel.full--;
    for (int64_t key = 0; key < panel.keys; key++) {
        int64_t token = my->token[key];
        my->where[key] = (int32_t)((token < part->first ? key : part->above + token - part->first) * wide);
    }
    int64_t turn = panel.row % each, token = first;
    for (int64_t row = 0; row < ROWS; row++) {
        my->who[row] = row < panel.rows ? (int32_t)token : -1;
        if (++turn == each) turn = 0, token++;
    }
    return panel;
}

/* where a row of a panel stands in a tensor of all heads */
INLINE float *row_of(const Call *call, const Scratch *my, const View *view, int64_t head, const Panel *panel,
                     int64_t row) {
    int64_t each = call->heads / call->key_heads, token = my->who[row];
    return view->data + (head * each + panel->row + row - token * each) * view->head + token * view->token;
}

/* the rows of a panel as [ROWS, wide], multiplied; beyond them zeros */
static void copy_rows(const Call *call, const Scratch *my, const View *view, int64_t head, Panel *panel, float factor,
                      float *to) {
    int64_t width = call->width, wide = stride(width);
    vec test = {0};
    for (int64_t row = 0; row < panel->rows; row++) {
        const float *from = row_of(call, my, view, head, panel, row);
        for (int64_t place = 0; place < width; place += LANES) {
            vec one = load(from + place) * factor;
            test += tested(one);
            store(to + row * wide + place, one);
        }
    }
    memset(to + panel->rows * wide, 0, 4 * (ROWS - panel->rows) * wide);
    panel->finite &= passed(test);
}

/* which rows of a vector see a token */
INLINE ivec seen(const Scratch *my, int vector, int32_t token, int32_t end) {
    ivec who = *(const ivec *)(my->who + vector * LANES);
    return (who >= token) & (who < end);
}

/* what is masked becomes -inf */
static void hide(const Call *call, const Scratch *my, int64_t first, int64_t count, float *share) {
    for (int64_t key = 0; key < count; key++) {
        int32_t token = my->token[first + key], end = call->end[token];
        for (int vector = 0; vector < VECTORS; vector++) {
            float *place = share + key * ROWS + vector * LANES;
            store(place, pick(seen(my, vector, token, end), load(place), all(-INFINITY)));
        }
    }
}

/* scores become shares under the greatest score so far; by how much what was summed before is now too much */
static void soften(float *share, int64_t count, vec *top, vec *total, vec *shrink) {
    for (int half = 0; half < VECTORS; half += 3) {
        vec before[3], now[3], sums[3];
        for (int i = 0; i < 3; i++) now[i] = before[i] = top[half + i];
        for (int64_t key = 0; key < count; key++)
            for (int i = 0; i < 3; i++) now[i] = larger(load(share + key * ROWS + (half + i) * LANES), now[i]);
        for (int i = 0; i < 3; i++) {
            shrink[half + i] = power_of_two(before[i] - now[i]);
            sums[i] = total[half + i] * shrink[half + i];
            top[half + i] = now[i];
        }
        for (int64_t key = 0; key < count; key++)
            for (int i = 0; i < 3; i++) {
                float *place = share + key * ROWS + (half + i) * LANES;
                vec one = power_of_two(load(place) - now[i]);
                sums[i] += one;
                store(place, one);
            }
        for (int i = 0; i < 3; i++) total[half + i] = sums[i];
    }
}

/* out and norm of the rows of a panel, some keys at a time: what is summed up shrinks when a greater score comes */
static void forward_panel(const Call *call, const Scratch *my, const Part *part, int64_t head, int64_t number) {
    int64_t width = call->width, wide = stride(width), each = call->heads / call->key_heads;
    Panel panel = panel_of(call, my, part, number);
    copy_rows(call, my, &call->query, head, &panel, call->scale, my->query);
    turn_panel(my->query, width, 1.44269504f, my->turned);
    memset(my->result, 0, 4 * ROWS * wide);
    vec top[VECTORS], total[VECTORS], shrink[VECTORS];
    /* not -inf, from which -inf cannot be taken: a row may see none of the first keys */
    for (int i = 0; i < VECTORS; i++) top[i] = all(-3.4028235e38f), total[i] = all(0.0f);
    for (int64_t first = 0; first < panel.keys; first += KEYS_FORWARD) {
        int64_t count = least(KEYS_FORWARD, panel.keys - first), clear = least(count, most(0, panel.full - first));
        scores(call, my, &panel, my->turned, my->keys, first, count, my->shares);
        hide(call, my, first + clear, count - clear, my->shares + clear * ROWS);
        soften(my->shares, count, top, total, shrink);
        for (int64_t row = 0; first && row < panel.rows; row++) {
            float factor = ((float *)shrink)[row];
            if (factor == 1.0f) continue;
            for (int64_t place = 0; place < width; place += LANES)
                store(my->result + row * wide + place, load(my->result + row * wide + place) * factor);
        }
        mix(call, my, &panel, my->shares, my->values, first, count, my->result);
    }
    float *norm = call->norm + head * call->size * each + panel.row;
    for (int64_t row = 0; row < panel.rows; row++) {
        float whole = ((float *)total)[row], factor = 1.0f / whole;
        float *to = row_of(call, my, &call->out, head, &panel, row);
        norm[row] = ((float *)top)[row] + log2f(whole);
        for (int64_t place = 0; place < width; place += LANES)
            store(to + place, load(my->result + row * wide + place) * factor);
    }
}

/* scores become shares under the norm, and their slopes the gradients of scores */
static void slope(const Call *call, const Scratch *my, int64_t first, int64_t count, int64_t clear) {
    for (int64_t key = 0; key < count; key++) {
        int32_t token = my->token[first + key], end = call->end[token];
        for (int vector = 0; vector < VECTORS; vector++) {
            int64_t place = key * ROWS + vector * LANES;
            vec share = power_of_two(load(my->shares + place) - load(my->norm + vector * LANES));
            vec found = share * (load(my->slopes + place) - load(my->delta + vector * LANES));
            if (key >= clear) {
                ivec sees = seen(my, vector, token, end);
                share = (vec)((ivec)share & sees), found = (vec)((ivec)found & sees);
            }
            store(my->shares + place, share);
            store(my->slopes + place, found);
        }
    }
}

/* d_query of the rows of a panel, and their part in the gradients of keys and values; shares are formed again */
static void backward_panel(const Call *call, const Scratch *my, const Part *part, int64_t head, int64_t number,
                           float *d_keys, float *d_values) {
    int64_t width = call->width, wide = stride(width), each = call->heads / call->key_heads;
    Panel panel = panel_of(call, my, part, number);
    copy_rows(call, my, &call->query, head, &panel, call->scale, my->query);
    turn_panel(my->query, width, 1.44269504f, my->turned);
    copy_rows(call, my, &call->outer, head, &panel, 1.0f, my->outer);
    turn_panel(my->outer, width, 1.0f, my->turned_outer);
    memset(my->result, 0, 4 * ROWS * wide);
    const float *norm = call->norm + head * call->size * each + panel.row;
    for (int64_t row = 0; row < ROWS; row++) {
        my->norm[row] = row < panel.rows ? norm[row] : INFINITY; /* a share of zero */
        my->delta[row] = 0.0f;
        if (row >= panel.rows) continue;
        const float *out = row_of(call, my, &call->out, head, &panel, row);
        vec total = {0};
        for (int64_t place = 0; place < width; place += LANES)
            total += load(out + place) * load(my->outer + row * wide + place);
        my->delta[row] = sum(total);
    }
    for (int64_t first = 0; first < panel.keys; first += KEYS_BACKWARD) {
        int64_t count = least(KEYS_BACKWARD, panel.keys - first), clear = least(count, most(0, panel.full - first));
        scores(call, my, &panel, my->turned, my->keys, first, count, my->shares);
        scores(call, my, &panel, my->turned_outer, my->values, first, count, my->slopes);
        slope(call, my, first, count, clear);
        spread(call, my, &panel, my->shares, my->outer, first, count, d_values);
        spread(call, my, &panel, my->slopes, my->query, first, count, d_keys);
        mix(call, my, &panel, my->slopes, my->keys, first, count, my->result);
    }
    for (int64_t row = 0; row < panel.rows; row++) {
        float *to = row_of(call, my, &call->d_query, head, &panel, row);
        for (int64_t place = 0; place < width; place += LANES)
            store(to + place, load(my->result + row * wide + place) * call->scale);
    }
}

/* how many keys the largest part has */
static int64_t most_keys(const Call *call) {
    int64_t found = 0;
    for (int64_t part = 0; part < call->parts; part++) found = most(found, call->room[part + 1] - call->room[part]);
    return found;
}

/* out and norm of query, key and value */
void tree_forward(const Call *call) {
    int64_t keys = most_keys(call);
#pragma omp parallel num_threads((int)call->threads) if (call->size * call->heads * call->width > MOVES)
    {
        Scratch my = scratch_of(call, omp_get_thread_num(), keys);
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < call->parts * call->key_heads; item++) {
            int64_t number = item / call->key_heads, head = item % call->key_heads;
            Part part = part_of(call, number);
            copy_keys(call, &my, &part, head);
            for (int64_t panel = call->bounds[number]; panel < call->bounds[number + 1]; panel++)
                forward_panel(call, &my, &part, head, panel);
        }
    }
}

/* gradients of a token's key or value: those of its own part, then of later ones that see it */
static void collect(const Call *call, int64_t head, int64_t token, const float *sums, const View *view) {
    int64_t width = call->width, wide = stride(width);
    float *to = view->data + head * view->head + token * view->token;
    int begun = 0;
    for (int64_t number = 0; number < call->parts; number++) {
        Part part = part_of(call, number);
        if (token >= part.last) continue;
        if (part.first >= call->end[token]) break;
        int64_t key = token < part.first ? call->position[token] : part.above + token - part.first;
        const float *from = sums + (call->room[number] + key) * wide;
        for (int64_t place = 0; place < width; place += LANES)
            if (begun)
                store(to + place, load(to + place) + load(from + place));
            else
                store(to + place, load(from + place));
        begun = 1;
    }
}

/* d_query, d_key and d_value of outer, the gradient of out */
void tree_backward(const Call *call) {
    int64_t keys = most_keys(call), wide = stride(call->width), all_keys = call->room[call->parts];
#pragma omp parallel num_threads((int)call->threads) if (call->size * call->heads * call->width > MOVES)
    {
        Scratch my = scratch_of(call, omp_get_thread_num(), keys);
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < call->parts * call->key_heads; item++) {
            int64_t number = item / call->key_heads, head = item % call->key_heads;
            Part part = part_of(call, number);
            float *d_keys = call->sums + (2 * head * all_keys + call->room[number]) * wide;
            float *d_values = d_keys + all_keys * wide;
            copy_keys(call, &my, &part, head);
            memset(d_keys, 0, 4 * part.keys * wide);
            memset(d_values, 0, 4 * part.keys * wide);
            for (int64_t panel = call->bounds[number]; panel < call->bounds[number + 1]; panel++)
                backward_panel(call, &my, &part, head, panel, d_keys, d_values);
        }
#pragma omp for schedule(static)
        for (int64_t item = 0; item < call->size * call->key_heads; item++) {
            int64_t head = item % call->key_heads, token = item / call->key_heads;
            const float *sums = call->sums + 2 * head * all_keys * wide;
            collect(call, head, token, sums, &call->d_key);
            collect(call, head, token, sums + all_keys * wide, &call->d_value);
        }
    }
}
