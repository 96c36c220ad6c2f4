/* Matrix products c = a b or c += a b: a [m, k] with any strides, b packed into panels, c in rows.

   A panel is PANEL_COLUMNS columns of b, stored row after row, so that it is read sequentially. Weights that are used
   many times are packed once. a is packed in groups of GROUP rows; RMS norm or a gate can be applied while a group is
   packed, which saves a pass over memory. A tile of one group and one panel is summed in registers in the order of k.
   The order of every sum is therefore the same for any m and any number of threads. */
#include "simd.h"

#define GROUP 4
#define VECTORS 3
#define PANEL_COLUMNS (VECTORS * LANES)
#define PREFETCH_STEP 16 /* steps along k between two prefetches */
#define BLOCK_ROWS 128   /* rows of a that are multiplied by a panel while it is in the cache */
#define L2_DEPTH 576     /* part of k for which a block of a stays in the L2 cache */
#define L1_DEPTH 192     /* part of k for which a panel stays in the L1 cache */

/* Return PANEL_COLUMNS, the number of columns of b in a panel. */
int64_t panel_columns(void) { return PANEL_COLUMNS; }

/* Pack a matrix into panels.

   b: [k, n], with stride_k floats between neighbours along k and stride_n along n.
   panels: written, contiguous [ceil(n / PANEL_COLUMNS), k, PANEL_COLUMNS]; columns beyond n are zero. */
void pack_matrix(const float *b, int64_t k, int64_t n, int64_t stride_k, int64_t stride_n, float *panels) {
    int64_t count = (n + PANEL_COLUMNS - 1) / PANEL_COLUMNS;
#pragma omp parallel for schedule(static) if (k * n > PARALLEL_COPIES)
    for (int64_t panel = 0; panel < count; panel++) {
        const float *from = b + panel * PANEL_COLUMNS * stride_n;
        float *to = panels + panel * PANEL_COLUMNS * k;
        int64_t width = min_i64(PANEL_COLUMNS, n - panel * PANEL_COLUMNS);
        if (width < PANEL_COLUMNS) memset(to, 0, sizeof(float) * PANEL_COLUMNS * k);
        for (int64_t first = 0; first < k; first += 16) { /* one cache line of a column at a time */
            int64_t last = min_i64(k, first + 16);
            for (int64_t column = 0; column < width; column++)
                for (int64_t row = first; row < last; row++)
                    to[row * PANEL_COLUMNS + column] = from[row * stride_k + column * stride_n];
        }
    }
}

/* How rows of a are read. PLAIN: unchanged. NORMED: divided by their root mean square, times `weight`. GATED: rows of
   2 k floats, silu of the first half times the second half. NORMED and GATED require unit stride along k. */
enum { PLAIN, NORMED, GATED };

typedef struct {
    const float *data;
    int64_t stride_m, stride_k;
    int kind;
    const float *weight;
    float epsilon;
} Left;

/* Return 1 / sqrt(mean of squares + epsilon) of a row of k floats. */
static float inv_rms(const float *row, int64_t k, float epsilon) {
    vec squares = {0};
    float tail = 0;
    int64_t i = 0;
    for (; i + LANES <= k; i += LANES) squares += load(row + i) * load(row + i);
    for (; i < k; i++) tail += row[i] * row[i];
    return 1.0f / sqrtf((sum_lanes(squares) + tail) / (float)k + epsilon);
}

/* to = silu(gate) * up, `size` floats of each */
static void silu_gate(const float *gate, const float *up, int64_t size, float *to) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        vec value = load(gate + i);
        store(to + i, value / (1.0f + vexp(-value)) * load(up + i));
    }
    for (; i < size; i++) to[i] = gate[i] / (1.0f + vexp(broadcast(-gate[i]))[0]) * up[i];
}

/* Pack `height` rows of a, from row `first` on, as [k, GROUP]. An incomplete group is filled with copies of its last
   row; the results of these copies are not stored. */
static void pack_group(const Left *left, int64_t first, int64_t height, int64_t k, float *to) {
    const float *rows[GROUP];
    float values[GROUP][L1_DEPTH], scale[GROUP];
    for (int64_t row = 0; row < GROUP; row++) {
        rows[row] = left->data + (first + min_i64(row, height - 1)) * left->stride_m;
        scale[row] = left->kind == NORMED ? inv_rms(rows[row], k, left->epsilon) : 1;
    }
    for (int64_t begin = 0; begin < k; begin += L1_DEPTH) {
        int64_t size = min_i64(L1_DEPTH, k - begin);
        for (int64_t row = 0; row < GROUP; row++) {
            const float *from = rows[row] + begin * left->stride_k;
            if (left->kind == NORMED)
                for (int64_t i = 0; i < size; i++) values[row][i] = from[i] * scale[row] * left->weight[begin + i];
            else if (left->kind == GATED)
                silu_gate(from, from + k, size, values[row]);
            else
                for (int64_t i = 0; i < size; i++) values[row][i] = from[i * left->stride_k];
        }
        for (int64_t i = 0; i < size; i++)
            for (int row = 0; row < GROUP; row++) to[(begin + i) * GROUP + row] = values[row][i];
    }
}

/* Multiply one tile: `size` steps along k of a packed group a [size, GROUP] and a panel b [size, PANEL_COLUMNS]. c
   [GROUP, PANEL_COLUMNS] is overwritten if `overwrite`, else added to. For every PREFETCH_STEP steps, `lines` cache
   lines from `prefetch` on are prefetched: weights come from main memory, and the next panel is loaded meanwhile. */
INLINE void multiply_tile(const float *restrict a, const float *restrict b, int64_t size, float *restrict c,
                          int overwrite, const char *prefetch, int64_t lines) {
    vec total[GROUP][VECTORS];
#pragma GCC unroll 4
    for (int row = 0; row < GROUP; row++)
#pragma GCC unroll 3
        for (int column = 0; column < VECTORS; column++)
            total[row][column] = overwrite ? (vec){0} : load(c + row * PANEL_COLUMNS + column * LANES);
    for (int64_t begin = 0; begin < size; begin += PREFETCH_STEP) {
        int64_t end = min_i64(size, begin + PREFETCH_STEP);
        for (int64_t line = 0; line < lines; line++, prefetch += 64) __builtin_prefetch(prefetch, 0, 2);
        for (int64_t i = begin; i < end; i++) {
            vec b0 = load(b), b1 = load(b + LANES), b2 = load(b + 2 * LANES);
            KEEP_IN_REGISTER(b0);
            KEEP_IN_REGISTER(b1);
            KEEP_IN_REGISTER(b2);
#pragma GCC unroll 4
            for (int row = 0; row < GROUP; row++) {
                float factor = a[row];
                total[row][0] += factor * b0;
                total[row][1] += factor * b1;
                total[row][2] += factor * b2;
            }
            a += GROUP, b += PANEL_COLUMNS;
        }
    }
#pragma GCC unroll 4
    for (int row = 0; row < GROUP; row++)
#pragma GCC unroll 3
        for (int column = 0; column < VECTORS; column++)
            store(c + row * PANEL_COLUMNS + column * LANES, total[row][column]);
}

/* Write the first `width` floats of a row of a tile to `out`, plus bias unless it is NULL; with `add`, add to `out`. */
INLINE void write_row(const float *row, const float *bias, int add, int64_t width, float *out) {
    if (width == PANEL_COLUMNS) {
        for (int column = 0; column < PANEL_COLUMNS; column += LANES) {
            vec value = load(row + column);
            if (bias) value += load(bias + column);
            if (add) value += load(out + column);
            store(out + column, value);
        }
        return;
    }
    for (int64_t column = 0; column < width; column++) {
        float value = bias ? row[column] + bias[column] : row[column];
        out[column] = add ? out[column] + value : value;
    }
}

/* c = f(a) b + bias, or c += f(a) b + bias if `add` is not 0.

   a: [m, k], or [m, 2 k] if kind is GATED, with stride_m floats between rows and stride_k along a row; stride_k must be
      1 unless kind is PLAIN.
   kind: how a is read (f), see the enum above. weight: k floats, and epsilon: read only if kind is NORMED.
   panels: b [k, n] as pack_matrix writes it; k and n are at least 1.
   bias: n floats, or NULL for none.
   c: [m, n], with stride_c floats between rows and unit stride along a row. It may overlap a, but not b or bias.
   packed: overwritten; m rounded up to a multiple of GROUP, times k floats. */
void packed_matmul(const float *a, int64_t m, int64_t k, int64_t stride_m, int64_t stride_k, int kind,
                   const float *weight, float epsilon, const float *panels, int64_t n, const float *bias, float *c,
                   int64_t stride_c, int add, float *packed) {
    Left left = {a, stride_m, stride_k, kind, weight, epsilon};
    int64_t count = (n + PANEL_COLUMNS - 1) / PANEL_COLUMNS, blocks = (m + BLOCK_ROWS - 1) / BLOCK_ROWS;
    int64_t groups = (m + GROUP - 1) / GROUP;
#pragma omp parallel if (m * n * k > PARALLEL_FLOPS)
    {
#pragma omp for schedule(static)
        for (int64_t group = 0; group < groups; group++)
            pack_group(&left, group * GROUP, min_i64(GROUP, m - group * GROUP), k, packed + group * GROUP * k);
        /* work items are (block of rows, panel) pairs; each thread takes a contiguous range of them */
        int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num(), items = blocks * count;
        int64_t first = items * thread / threads, last = items * (thread + 1) / threads;
        float tiles[BLOCK_ROWS * PANEL_COLUMNS] __attribute__((aligned(64)));
        for (int64_t block = first / count; block * count < last; block++) {
            int64_t first_panel = max_i64(first - block * count, 0), last_panel = min_i64(last - block * count, count);
            int64_t first_row = block * BLOCK_ROWS, rows = min_i64(BLOCK_ROWS, m - first_row);
            for (int64_t outer = 0; outer < k; outer += L2_DEPTH) {
                int64_t end = min_i64(k, outer + L2_DEPTH);
                for (int64_t panel = first_panel; panel < last_panel; panel++) {
                    for (int64_t inner = outer; inner < end; inner += L1_DEPTH) {
                        int64_t size = min_i64(L1_DEPTH, end - inner);
                        const float *b = panels + panel * PANEL_COLUMNS * k + inner * PANEL_COLUMNS;
                        const float *next = inner + L1_DEPTH < end ? b + L1_DEPTH * PANEL_COLUMNS
                                                                   : panels + ((panel + 1) * k + outer) * PANEL_COLUMNS;
                        int64_t steps = (rows + GROUP - 1) / GROUP * ((size + PREFETCH_STEP - 1) / PREFETCH_STEP);
                        int64_t lines = panel + 1 < count ? (L1_DEPTH * PANEL_COLUMNS / 16 + steps - 1) / steps : 0;
                        const char *prefetch = (const char *)next;
                        for (int64_t row = 0; row < rows; row += GROUP) {
                            multiply_tile(packed + (first_row + row) * k + inner * GROUP, b, size,
                                          tiles + row * PANEL_COLUMNS, inner == outer, prefetch, lines);
                            prefetch += (size + PREFETCH_STEP - 1) / PREFETCH_STEP * lines * 64;
                        }
                    }
                    int64_t column = panel * PANEL_COLUMNS, width = min_i64(PANEL_COLUMNS, n - column);
                    const float *panel_bias = bias && !outer ? bias + column : NULL;
                    for (int64_t row = 0; row < rows; row++)
                        write_row(tiles + row * PANEL_COLUMNS, panel_bias, add || outer, width,
                                  c + (first_row + row) * stride_c + column);
                }
            }
        }
    }
}
