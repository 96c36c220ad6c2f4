/* Matrix products c = a b, or c += a b: a [m, k] anyhow in memory, b packed into panels, c in rows.

   A panel is COLUMNS columns of b, row after row, so that it is read straight through. Weights that are used again and
   again are packed once. a is packed four rows at a time, a group, and on the way a group may be normalised or gated,
   which saves a pass over memory for each. A tile of four rows and one panel is summed up in registers, in the order of
   k, and so is every number: whatever m is and however many threads there are. */
#include "common.h"

#define GROUP 4
#define VECTORS 3
#define COLUMNS (VECTORS * LANES)
#define STRIDE 16 /* numbers between two looks ahead */
#define BLOCK 128 /* rows of a that are multiplied by a panel while it is in the cache */
#define CHUNK 576 /* of k: a block of a then stays in the second cache */
#define PIECE 192 /* of k: a panel then stays in the first */

int64_t panel_columns(void) { return COLUMNS; }

/* b [k, n], whose neighbours along k and n are so many floats apart, as panels [n / COLUMNS, k, COLUMNS] */
void pack(const float *b, int64_t k, int64_t n, int64_t along_k, int64_t along_n, float *panels) {
    int64_t count = (n + COLUMNS - 1) / COLUMNS;
#pragma omp parallel for schedule(static) if (k * n > MOVES)
    for (int64_t panel = 0; panel < count; panel++) {
        const float *from = b + panel * COLUMNS * along_n;
        float *to = panels + panel * COLUMNS * k;
        int64_t width = least(COLUMNS, n - panel * COLUMNS);
        if (width < COLUMNS) memset(to, 0, sizeof(float) * COLUMNS * k);
        for (int64_t first = 0; first < k; first += 16) { /* a line of the cache at a time */
            int64_t last = least(k, first + 16);
            for (int64_t column = 0; column < width; column++)
                for (int64_t row = first; row < last; row++)
                    to[row * COLUMNS + column] = from[row * along_k + column * along_n];
        }
    }
}

/* how a group of a is read: as it is; each row divided by its root mean square, times `weight`; or as the halves of
   rows of 2 k, silu of the first times the second */
enum { PLAIN, NORMED, GATED };

typedef struct {
    const float *from;
    int64_t along_m, along_k;
    int kind;
    const float *weight;
    float epsilon;
} Left;

/* 1 / the root mean square of a row */
static float steepness(const float *row, int64_t k, float epsilon) {
    vec squares = {0};
    float rest = 0;
    int64_t place = 0;
    for (; place + LANES <= k; place += LANES) squares += load(row + place) * load(row + place);
    for (; place < k; place++) rest += row[place] * row[place];
    return 1.0f / sqrtf((sum(squares) + rest) / (float)k + epsilon);
}

/* silu of the gate times up */
static void gated(const float *gate, const float *up, int64_t size, float *to) {
    int64_t place = 0;
    for (; place + LANES <= size; place += LANES) {
        vec value = load(gate + place);
        store(to + place, value / (1.0f + vexp(-value)) * load(up + place));
    }
    for (; place < size; place++) to[place] = gate[place] / (1.0f + vexp(all(-gate[place]))[0]) * up[place];
}

/* `high` rows of k, as [k, GROUP]; a group that is not full is filled up with its last row, which nobody reads */
static void pack_group(const Left *left, int64_t first, int64_t high, int64_t k, float *to) {
    const float *rows[GROUP];
    float made[GROUP][PIECE], scale[GROUP];
    for (int64_t row = 0; row < GROUP; row++) {
        rows[row] = left->from + (first + least(row, high - 1)) * left->along_m;
        scale[row] = left->kind == NORMED ? steepness(rows[row], k, left->epsilon) : 1;
    }
    for (int64_t begin = 0; begin < k; begin += PIECE) {
        int64_t size = least(PIECE, k - begin);
        for (int64_t row = 0; row < GROUP; row++) {
            const float *here = rows[row] + begin * left->along_k;
            if (left->kind == NORMED)
                for (int64_t place = 0; place < size; place++)
                    made[row][place] = here[place] * scale[row] * left->weight[begin + place];
            else if (left->kind == GATED)
                gated(here, here + k, size, made[row]);
            else
                for (int64_t place = 0; place < size; place++) made[row][place] = here[place * left->along_k];
        }
        for (int64_t place = 0; place < size; place++)
            for (int row = 0; row < GROUP; row++) to[(begin + place) * GROUP + row] = made[row][place];
    }
}

/* one tile: GROUP rows of a against one panel, `size` numbers of each, on top of what is there unless it is fresh.
   Meanwhile `lines` lines of what is multiplied next are fetched for every STRIDE numbers: weights come from memory, and
   nobody waits for them. */
INLINE void tile(const float *restrict a, const float *restrict b, int64_t size, float *restrict c, int fresh,
                 const char *next, int64_t lines) {
    vec found[GROUP][VECTORS];
#pragma GCC unroll 4
    for (int row = 0; row < GROUP; row++)
#pragma GCC unroll 3
        for (int column = 0; column < VECTORS; column++)
            found[row][column] = fresh ? (vec){0} : load(c + row * COLUMNS + column * LANES);
    for (int64_t from = 0; from < size; from += STRIDE) {
        int64_t to = least(size, from + STRIDE);
        for (int64_t line = 0; line < lines; line++, next += 64) __builtin_prefetch(next, 0, 2);
        for (int64_t place = from; place < to; place++) {
            vec b0 = load(b), b1 = load(b + LANES), b2 = load(b + 2 * LANES);
            HOLD(b0);
            HOLD(b1);
            HOLD(b2);
#pragma GCC unroll 4
            for (int row = 0; row < GROUP; row++) {
                float one = a[row];
                found[row][0] += one * b0;
                found[row][1] += one * b1;
                found[row][2] += one * b2;
            }
            a += GROUP, b += COLUMNS;
        }
    }
#pragma GCC unroll 4
    for (int row = 0; row < GROUP; row++)
#pragma GCC unroll 3
        for (int column = 0; column < VECTORS; column++)
            store(c + row * COLUMNS + column * LANES, found[row][column]);
}

/* one row of a tile to where it belongs */
INLINE void put(const float *found, const float *bias, int on_top, int64_t width, float *out) {
    if (width == COLUMNS) {
        for (int column = 0; column < COLUMNS; column += LANES) {
            vec value = load(found + column);
            if (bias) value += load(bias + column);
            if (on_top) value += load(out + column);
            store(out + column, value);
        }
        return;
    }
    for (int64_t column = 0; column < width; column++) {
        float value = bias ? found[column] + bias[column] : found[column];
        out[column] = on_top ? out[column] + value : value;
    }
}

/* `packed` has room for m, rounded up to GROUP, times k floats. c = a b + bias, or c += a b + bias; bias may be NULL */
void product(const float *a, int64_t m, int64_t k, int64_t along_m, int64_t along_k, int kind, const float *weight,
             float epsilon, const float *panels, int64_t n, const float *bias, float *c, int64_t along_c, int add,
             float *packed) {
    Left left = {a, along_m, along_k, kind, weight, epsilon};
    int64_t count = (n + COLUMNS - 1) / COLUMNS, blocks = (m + BLOCK - 1) / BLOCK;
    int64_t groups = (m + GROUP - 1) / GROUP;
#pragma omp parallel if (m * n * k > WORTH)
    {
#pragma omp for schedule(static)
        for (int64_t group = 0; group < groups; group++)
            pack_group(&left, group * GROUP, least(GROUP, m - group * GROUP), k, packed + group * GROUP * k);
        int64_t threads = omp_get_num_threads(), number = omp_get_thread_num(), all_of_them = blocks * count;
        int64_t first = all_of_them * number / threads, last = all_of_them * (number + 1) / threads;
        float found[BLOCK * COLUMNS] __attribute__((aligned(64)));
        for (int64_t block = first / count; block * count < last; block++) {
            int64_t from = most(first - block * count, 0), to = least(last - block * count, count);
            int64_t above = block * BLOCK, rows = least(BLOCK, m - above);
            for (int64_t chunk = 0; chunk < k; chunk += CHUNK) {
                int64_t end = least(k, chunk + CHUNK);
                for (int64_t panel = from; panel < to; panel++) {
                    for (int64_t piece = chunk; piece < end; piece += PIECE) {
                        int64_t size = least(PIECE, end - piece);
                        const float *right = panels + panel * COLUMNS * k + piece * COLUMNS;
                        const float *after = piece + PIECE < end ? right + PIECE * COLUMNS
                                                                 : panels + ((panel + 1) * k + chunk) * COLUMNS;
                        int64_t strides = (rows + GROUP - 1) / GROUP * ((size + STRIDE - 1) / STRIDE);
                        int64_t lines = panel + 1 < count ? (PIECE * COLUMNS / 16 + strides - 1) / strides : 0;
                        const char *next = (const char *)after;
                        for (int64_t row = 0; row < rows; row += GROUP) {
                            tile(packed + (above + row) * k + piece * GROUP, right, size, found + row * COLUMNS,
                                 piece == chunk, next, lines);
                            next += (size + STRIDE - 1) / STRIDE * lines * 64;
                        }
                    }
                    int64_t before = panel * COLUMNS, width = least(COLUMNS, n - before);
                    const float *more = bias && !chunk ? bias + before : NULL;
                    for (int64_t row = 0; row < rows; row++)
                        put(found + row * COLUMNS, more, add || chunk, width, c + (above + row) * along_c + before);
                }
            }
        }
    }
}
