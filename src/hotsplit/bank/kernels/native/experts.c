/* The routed experts of one layer, over pointers to rows, and single projections beside them, for a few tokens.
 *
 *   experts_begin    a call: which pairs belong to which expert, which rows are cold, hidden states as the path wants them
 *   experts_hot      the experts of hot rows
 *   experts_cold     one of a cold row, when that has arrived
 *   experts_end      pairs added in their order, so that the result has one order of adding whatever came first
 *   experts_linear   one projection alone, of the model's dense part: the same products, rounded to the tokens' kind
 *
 * Work is cut into units whose results do not depend on who computes them, and threads take the next unit that is left.
 * The threads are those of the OpenMP that the caller's own library runs on: its GOMP_parallel is handed in, and a null
 * pointer means one thread. A second set of threads beside it would fight for the same cores.
 *
 * Source: signature and meaning of GOMP_parallel as in GCC's libgomp (its ABI is frozen, and LLVM's OpenMP has it too).
 */
#include <stdint.h>
#include <string.h>

#include "experts.h"
#include "scalars.h"


/* Inner values, and outputs, of one unit: many, since each unit begins its streams to the memory anew; few enough that
 * threads share evenly. Two parts of products fit, and whole vectors behind each.
 * Source: one thread over experts of 1024 x 512 in bfloat16 reads 21 GB/s with 32 inner values and 64 outputs in a unit,
 * and 29 with 256 and 512. */
enum { PAD = 32, FEW_INNER = 32, MANY_INNER = 256, PART = MANY_INNER + PAD, STRIDE = 2 * PART };
enum { FEW_OUTPUTS = 64, MANY_OUTPUTS = 2 * MANY_INNER, UNITS_PER_THREAD = 4 };

struct call {
    const struct form *form;
    const struct expert *experts;
    int64_t num_experts;
    const int64_t *tokens; /* of the pairs */
    const char *inputs;    /* of up, from experts_tokens, one row per token */
    char *inner;           /* inputs of down, one row per pair */
    float *outputs;        /* [N, D] */
    int64_t width;         /* of a unit */
    int64_t num_units;     /* of one expert */
    int64_t next;
    void (*unit)(const struct call *call, const struct expert *expert, int64_t number);
};

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t parts(int64_t whole, int64_t part) { return (whole + part - 1) / part; }
static int64_t inner_dim(const struct form *form) { return form->down.inputs; }

/* Of `whole` in all, how many make a unit: whole times `few`. Transposed weights lie side by side in a unit, so that it is
 * as wide as it can be. What an output is does not depend on it. */
static int64_t unit_of(int64_t whole, int64_t num_threads, int64_t few, int64_t many, int64_t is_transposed) {
    const int64_t share_of_thread = whole / ((num_threads > 1 ? num_threads * UNITS_PER_THREAD : 1) * few) * few;
    const int64_t least = share_of_thread < few ? few : share_of_thread;
    return is_transposed ? many : smaller(least, many);
}

/* Whether a projection multiplies pairs of bfloat16. */
static int takes_halves(const struct form *form, const struct matrix *matrix) {
    return path_at(form->path)->takes_bfloat16 && matrix->kind == BFLOAT16 && !matrix->is_transposed &&
           form->token_kind == BFLOAT16;
}

static const struct path *path_for(const struct form *form, const struct matrix *matrix) {
    const struct path *path = path_at(form->path);
    return takes_halves(form, matrix) ? path : path_without_halves(path);
}

/* Bytes of one row of a projection's inputs: with zeros behind them up to whole vectors. */
static int64_t input_bytes(const struct form *form, const struct matrix *matrix) {
    return parts(matrix->inputs, PAD) * PAD * (takes_halves(form, matrix) ? 2 : 4);
}

/* Rounds inner values to the tokens' kind and puts them where the second projection reads them. */
static void put_inner(const struct form *form, float *values, int64_t first, int64_t count, char *row) {
    const struct path *path = path_at(form->path);
    const int halves = takes_halves(form, &form->down);
    if (halves) {
        uint16_t *to = (uint16_t *)row + first;
        for (int64_t i = 0; i < count; i++) to[i] = bfloat16_of_float(values[i]);
        return;
    }
    if (form->token_kind == BFLOAT16)
        for (int64_t i = 0; i < count; i++) values[i] = float_of_bfloat16(bfloat16_of_float(values[i]));
    if (form->token_kind == FLOAT16) {
        uint16_t rounded[MANY_INNER];
        path->to_float16(values, rounded, count);
        path->from_float16(rounded, values, count);
    }
    memcpy(row + first * 4, values, (size_t)count * 4);
}

static void clear_tail(const struct form *form, const struct matrix *matrix, char *row) {
    const int64_t used = matrix->inputs * (takes_halves(form, matrix) ? 2 : 4);
    memset(row + used, 0, (size_t)(input_bytes(form, matrix) - used));
}

static void add_bias(const struct matrix *matrix, const void *bias, int64_t first, int64_t count, float *out,
                     int64_t num_inputs) {
    if (bias == NULL) return;
    for (int64_t i = 0; i < count; i++) {
        const float number = number_at(matrix->bias_kind, bias, first + i);
        for (int64_t m = 0; m < num_inputs; m++) out[m * STRIDE + i] += number;
    }
}

/* count outputs of a projection from `first` on, bias added, for up to MOST_TOKENS rows of inputs. */
static void project(const struct form *form, const struct matrix *matrix, const void *const weights[3], int64_t first,
                    int64_t count, const void *const *inputs, int64_t num_inputs, float *out) {
    path_for(form, matrix)->product(matrix, weights[0], weights[1], first, count, inputs, num_inputs, out, STRIDE);
    add_bias(matrix, weights[2], first, count, out, num_inputs);
}

/* Gate and other products of inner values [first, first + count), each in its part of a row. */
static void first_products(const struct form *form, const struct expert *expert, int64_t first, int64_t count,
                           const void *const *inputs, int64_t num_inputs, float *products) {
    const void *const weights[3] = {expert->up, expert->up_scale, expert->up_bias};
    if (!form->is_interleaved) {
        project(form, &form->up, weights, first, count, inputs, num_inputs, products);
        if (form->has_gate)
            project(form, &form->up, weights, inner_dim(form) + first, count, inputs, num_inputs, products + PART);
        return;
    }
    float both[MOST_TOKENS * STRIDE];
    project(form, &form->up, weights, 2 * first, 2 * count, inputs, num_inputs, both);
    for (int64_t m = 0; m < num_inputs; m++)
        for (int64_t i = 0; i < count; i++) {
            products[m * STRIDE + i] = both[m * STRIDE + 2 * i];
            products[m * STRIDE + PART + i] = both[m * STRIDE + 2 * i + 1];
        }
}

static void inner_of_unit(const struct call *call, const struct expert *expert, int64_t number) {
    const struct form *form = call->form;
    const int64_t first = number * call->width, count = smaller(call->width, inner_dim(form) - first);
    const int64_t from_bytes = input_bytes(form, &form->up), to_bytes = input_bytes(form, &form->down);
    const struct path *path = path_at(form->path);
    float products[MOST_TOKENS * STRIDE], inner[MANY_INNER];
    for (int64_t done = 0; done < expert->count; done += MOST_TOKENS) {
        const int64_t pair = expert->first + done, num_inputs = smaller(MOST_TOKENS, expert->count - done);
        const void *inputs[MOST_TOKENS];
        for (int64_t m = 0; m < num_inputs; m++) inputs[m] = call->inputs + call->tokens[pair + m] * from_bytes;
        first_products(form, expert, first, count, inputs, num_inputs, products);
        for (int64_t m = 0; m < num_inputs; m++) {
            char *row = call->inner + (pair + m) * to_bytes;
            path->activate(form, products + m * STRIDE, products + m * STRIDE + PART, inner, count);
            put_inner(form, inner, first, count, row);
            if (first + count == inner_dim(form)) clear_tail(form, &form->down, row);
        }
    }
}

static void outputs_of_unit(const struct call *call, const struct expert *expert, int64_t number) {
    const struct form *form = call->form;
    const int64_t hidden_dim = form->down.outputs, first = number * call->width;
    const int64_t count = smaller(call->width, hidden_dim - first), bytes = input_bytes(form, &form->down);
    const void *const weights[3] = {expert->down, expert->down_scale, expert->down_bias};
    float products[MOST_TOKENS * STRIDE];
    for (int64_t done = 0; done < expert->count; done += MOST_TOKENS) {
        const int64_t pair = expert->first + done, num_inputs = smaller(MOST_TOKENS, expert->count - done);
        const void *inputs[MOST_TOKENS];
        for (int64_t m = 0; m < num_inputs; m++) inputs[m] = call->inner + (pair + m) * bytes;
        project(form, &form->down, weights, first, count, inputs, num_inputs, products);
        for (int64_t m = 0; m < num_inputs; m++)
            memcpy(call->outputs + (pair + m) * hidden_dim + first, products + m * STRIDE, (size_t)count * 4);
    }
}

static void take_units(void *data) {
    struct call *call = data;
    const int64_t total = call->num_units * call->num_experts;
    for (;;) {
        const int64_t unit = __atomic_fetch_add(&call->next, 1, __ATOMIC_RELAXED);
        if (unit >= total) return;
        call->unit(call, call->experts + unit / call->num_units, unit % call->num_units);
    }
}

static void share(struct call *call, int64_t whole, int64_t num_threads, parallel_function parallel) {
    call->num_units = parts(whole, call->width);
    call->next = 0;
    if (parallel == NULL || num_threads <= 1) take_units(call);
    else parallel(take_units, call, (unsigned)num_threads, 0);
}

struct linear {
    const struct form *form; /* its first projection */
    const void *weight, *bias;
    const char *inputs; /* from experts_tokens */
    int64_t num_inputs;
    char *out; /* [num_inputs, outputs] of the tokens' kind */
    int64_t width; /* of a unit */
    int64_t next;
};

static void put_outputs(const struct form *form, const float *values, int64_t count, char *to) {
    switch (form->token_kind) {
    case FLOAT32: memcpy(to, values, (size_t)count * 4); break;
    case FLOAT16: path_at(form->path)->to_float16(values, (uint16_t *)to, count); break;
    default:
        for (int64_t i = 0; i < count; i++) ((uint16_t *)to)[i] = bfloat16_of_float(values[i]);
    }
}

static void take_outputs(void *data) {
    struct linear *linear = data;
    const struct form *form = linear->form;
    const struct matrix *matrix = &form->up;
    const void *const weights[3] = {linear->weight, NULL, linear->bias};
    const int64_t from_bytes = input_bytes(form, matrix), size = bytes_of(form->token_kind);
    float products[MOST_TOKENS * STRIDE];
    for (;;) {
        const int64_t first = linear->width * __atomic_fetch_add(&linear->next, 1, __ATOMIC_RELAXED);
        if (first >= matrix->outputs) return;
        const int64_t count = smaller(linear->width, matrix->outputs - first);
        for (int64_t done = 0; done < linear->num_inputs; done += MOST_TOKENS) {
            const int64_t num_inputs = smaller(MOST_TOKENS, linear->num_inputs - done);
            const void *inputs[MOST_TOKENS];
            for (int64_t m = 0; m < num_inputs; m++) inputs[m] = linear->inputs + (done + m) * from_bytes;
            project(form, matrix, weights, first, count, inputs, num_inputs, products);
            for (int64_t m = 0; m < num_inputs; m++) {
                char *to = linear->out + ((done + m) * matrix->outputs + first) * size;
                put_outputs(form, products + m * STRIDE, count, to);
            }
        }
    }
}

/* ---- one layer's call */

/* Its scratch, which begins with the rows that its runs are of. */
struct areas {
    int64_t *rows;       /* [E], of the runs */
    struct expert *runs; /* [E], hot ones first */
    int64_t *starts;     /* [E + 1], of every expert's pairs */
    int64_t *places;     /* [N], of a pair in ids, rows and weights */
    int64_t *tokens;     /* [N] */
    char *inputs;        /* [T] rows of the first projection's inputs */
    char *inner;         /* [N] of the second's */
    float *outputs;      /* [N, D] */
    float *sums;         /* [T, D] */
};

enum { LINE = 64 };

static char *take(char **at, int64_t num_bytes) {
    char *taken = *at;
    *at += parts(num_bytes, LINE) * LINE;
    return taken;
}

/* Where the areas lie in a layer's scratch; returns how many bytes they take, a line for the scratch's own address. */
static int64_t areas_of(const struct layer *layer, struct areas *areas) {
    const struct form *form = layer->form;
    const int64_t num_tokens = layer->num_tokens, most_pairs = num_tokens * layer->top_k, hidden_dim = form->down.outputs;
    char *const first = (char *)(parts((int64_t)(intptr_t)layer->scratch, LINE) * LINE), *at = first;
    areas->rows = (int64_t *)take(&at, layer->num_experts * 8);
    areas->runs = (struct expert *)take(&at, layer->num_experts * (int64_t)sizeof(struct expert));
    areas->starts = (int64_t *)take(&at, (layer->num_experts + 1) * 8);
    areas->places = (int64_t *)take(&at, most_pairs * 8);
    areas->tokens = (int64_t *)take(&at, most_pairs * 8);
    areas->inputs = take(&at, num_tokens * input_bytes(form, &form->up));
    areas->inner = take(&at, most_pairs * input_bytes(form, &form->down));
    areas->outputs = (float *)take(&at, most_pairs * hidden_dim * 4);
    areas->sums = (float *)take(&at, num_tokens * hidden_dim * 4);
    return at - first + LINE;
}

/* Pairs ascending by expert, then place, then token, as the exact kernel has them; sentinels have none. */
static void sort_pairs(struct layer *layer, struct areas *areas) {
    const int64_t num_experts = layer->num_experts, num_all = layer->num_tokens * layer->top_k;
    int64_t *starts = areas->starts;
    memset(starts, 0, (size_t)(num_experts + 1) * sizeof *starts);
    for (int64_t i = 0; i < num_all; i++)
        if (layer->ids[i] >= 0 && layer->ids[i] < num_experts) starts[layer->ids[i] + 1]++;
    for (int64_t e = 0; e < num_experts; e++) starts[e + 1] += starts[e];
    layer->num_pairs = starts[num_experts];
    for (int64_t place = 0; place < layer->top_k; place++)
        for (int64_t token = 0; token < layer->num_tokens; token++) {
            const int64_t at = token * layer->top_k + place, id = layer->ids[at];
            if (id < 0 || id >= num_experts) continue;
            areas->places[starts[id]] = at;
            areas->tokens[starts[id]++] = token; /* leaves starts one expert further on */
        }
}

/* One run per expert that has pairs: those of hot rows in front, with their addresses, those of cold ones behind. */
static void find_rows(struct layer *layer, struct areas *areas) {
    layer->num_hot = layer->num_cold = layer->num_unknown = 0;
    for (int is_cold = 0; is_cold < 2; is_cold++)
        for (int64_t e = 0; e < layer->num_experts; e++) {
            const int64_t first = e == 0 ? 0 : areas->starts[e - 1], count = areas->starts[e] - first;
            if (count == 0) continue;
            const int64_t row = layer->rows[areas->places[first]];
            if ((row >= layer->first_cold) != is_cold) continue;
            const int64_t number = layer->num_hot + layer->num_cold;
            struct expert *run = areas->runs + number;
            areas->rows[number] = row;
            run->first = first;
            run->count = count;
            if (is_cold) {
                layer->num_cold++;
                continue;
            }
            memcpy(run, layer->addresses[row], sizeof layer->addresses[row]);
            layer->num_unknown += run->up == NULL;
            layer->num_hot++;
        }
}

/* Outputs of some runs' pairs, unweighted. */
static void compute(const struct layer *layer, const struct areas *areas, const struct expert *runs, int64_t num_runs) {
    const struct form *form = layer->form;
    const int64_t threads = layer->parallel == NULL ? 1 : layer->num_threads;
    struct call call = {.form = form, .experts = runs, .num_experts = num_runs, .tokens = areas->tokens,
                        .inputs = areas->inputs, .inner = areas->inner, .outputs = areas->outputs};
    if (num_runs == 0) return;
    call.unit = inner_of_unit;
    call.width = unit_of(inner_dim(form) * num_runs, threads, FEW_INNER, MANY_INNER, form->up.is_transposed);
    share(&call, inner_dim(form), threads, layer->parallel);
    call.unit = outputs_of_unit;
    call.width = unit_of(form->down.outputs * num_runs, threads, FEW_OUTPUTS, MANY_OUTPUTS, form->down.is_transposed);
    share(&call, form->down.outputs, threads, layer->parallel);
}

/* ---- what fast.py and fast_linear.py call */

/* Changes with the structs of experts.h and the functions below. */
int64_t experts_abi(void) { return 3; }

/* Name of the path with this index, worst first; NULL behind the last that this processor can take. */
const char *experts_path(int64_t index) {
    const struct path *path = path_at(index);
    return path == NULL ? NULL : path->name;
}

/* Bytes of one row of inputs: of the first projection (0) and the second (1). */
int64_t experts_input_bytes(const struct form *form, int64_t second) {
    return input_bytes(form, second ? &form->down : &form->up);
}

/* Hidden states [T, D], rows of their own kind one behind the other, as the first projection reads them. */
void experts_tokens(const struct form *form, const void *hidden_states, int64_t num_tokens, char *inputs) {
    const struct path *path = path_at(form->path);
    const int64_t width = form->up.inputs, from_bytes = width * bytes_of(form->token_kind);
    const int64_t to_bytes = input_bytes(form, &form->up);
    for (int64_t t = 0; t < num_tokens; t++) {
        const char *from = (const char *)hidden_states + t * from_bytes;
        char *to = inputs + t * to_bytes;
        if (takes_halves(form, &form->up) || form->token_kind == FLOAT32) memcpy(to, from, (size_t)from_bytes);
        else if (form->token_kind == FLOAT16) path->from_float16((const uint16_t *)from, (float *)to, width);
        else
            for (int64_t i = 0; i < width; i++) ((float *)to)[i] = number_at(BFLOAT16, from, i);
        clear_tail(form, &form->up, to);
    }
}

/* How many bytes of scratch a layer's call needs. */
int64_t experts_scratch(const struct form *form, int64_t num_tokens, int64_t top_k, int64_t num_experts) {
    struct layer layer = {.form = form, .num_tokens = num_tokens, .top_k = top_k, .num_experts = num_experts};
    struct areas areas;
    return areas_of(&layer, &areas);
}

/* Sorts the pairs and prepares the tokens. Which runs are hot, cold, or hot at an address that is not known yet, the layer
 * says afterwards; the latter are for the caller to fill in before it begins once more. */
void experts_begin(struct layer *layer) {
    struct areas areas;
    areas_of(layer, &areas);
    sort_pairs(layer, &areas);
    find_rows(layer, &areas);
    if (layer->num_unknown == 0) experts_tokens(layer->form, layer->hidden, layer->num_tokens, areas.inputs);
}

/* Outputs of the pairs of all hot rows. */
void experts_hot(const struct layer *layer) {
    struct areas areas;
    areas_of(layer, &areas);
    compute(layer, &areas, areas.runs, layer->num_hot);
}

/* Outputs of the pairs of one cold row: the number-th, whose tensors lie at these addresses now. */
void experts_cold(const struct layer *layer, int64_t number, const void *const addresses[NUM_ADDRESSES]) {
    struct areas areas;
    areas_of(layer, &areas);
    struct expert *run = areas.runs + layer->num_hot + number;
    memcpy(run, addresses, NUM_ADDRESSES * sizeof *addresses);
    compute(layer, &areas, run, 1);
}

/* Every token's weighted outputs, added pair by pair and rounded once. */
void experts_end(const struct layer *layer) {
    const struct path *path = path_at(layer->form->path);
    const int64_t width = layer->form->down.outputs, size = bytes_of(layer->form->token_kind);
    struct areas areas;
    areas_of(layer, &areas);
    memset(areas.sums, 0, (size_t)(layer->num_tokens * width) * 4);
    for (int64_t n = 0; n < layer->num_pairs; n++) {
        const float weight = number_at(layer->weight_kind, layer->weights, areas.places[n]);
        path->add(areas.sums + areas.tokens[n] * width, weight, areas.outputs + n * width, width);
    }
    for (int64_t t = 0; t < layer->num_tokens; t++)
        put_outputs(layer->form, areas.sums + t * width, width, (char *)layer->out + t * width * size);
}

/* One projection: form's first, with the bias that it may have. */
void experts_linear(const struct form *form, const void *weight, const void *bias, const char *inputs,
                    int64_t num_inputs, void *out, int64_t num_threads, parallel_function parallel) {
    const int is_alone = parallel == NULL || num_threads <= 1 || form->up.outputs <= FEW_OUTPUTS;
    struct linear linear = {form, weight, bias, inputs, num_inputs, out, 0, 0};
    linear.width = unit_of(form->up.outputs, is_alone ? 1 : num_threads, FEW_OUTPUTS, MANY_OUTPUTS, 0);
    if (is_alone) take_outputs(&linear);
    else parallel(take_outputs, &linear, (unsigned)num_threads, 0);
}
