/* export_grok.h - Grok-1 engines from C.
 *
 * A library, not a server: open a bundle, submit prompts from any thread, take UTF-8 text piece by
 * piece, cancel. It embeds the Python interpreter that it was made for; no Python object, error or
 * signal handler crosses this border, and nothing here aborts the process: a wrong handle, a null
 * pointer or a value out of range gives a code, with a text from eg_last_error().
 *
 * Threads: every function may be called from any thread at any time; one request is pulled by one
 * thread at a time. Handles are numbers that are never used twice: one that was closed, or never
 * was, is told EG_CLOSED. 0 is no handle.
 *
 * Structures begin with their size: set it with the EG_..._INIT macros. A library takes structures
 * of older headers, fields that they lack having their defaults, and gives such a structure no more
 * than it holds. Fields are added at the end only.
 *
 * Strings that come in are UTF-8, zero at the end. Strings that go out have a length, and a zero
 * behind it.
 */

#ifndef EXPORT_GROK_H
#define EXPORT_GROK_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Version of this interface: functions are never taken away, fields and functions may come. */
#define EG_ABI_VERSION 1

/* What a call comes to. 0 and more is fine; less is an error. */
typedef enum eg_status {
    EG_OK = 0,
    EG_END = 1,          /* no piece is left: the answer has ended */
    EG_TIMEOUT = 2,      /* nothing came in the time given */
    EG_TRUNCATED = 3,    /* the buffer was too small: `length` says how much it takes */
    EG_ARGUMENT = -1,    /* a null pointer, a structure without a size, text that is no UTF-8 */
    EG_CLOSED = -2,      /* the handle was closed, never was, or its model was ended by an error */
    EG_BUNDLE = -3,      /* the bundle is missing, damaged or unfinished */
    EG_CONFIG = -4,      /* an option cannot be, on this machine or with this bundle */
    EG_REQUEST = -5,     /* a prompt or a parameter is out of range */
    EG_BUSY = -6,        /* as many requests wait as may: submit it later */
    EG_ENGINE = -7,      /* the engine failed: a rank died, or values are no numbers */
    EG_MEMORY = -8,      /* memory ran out */
    EG_PYTHON = -9,      /* the interpreter or a package that the library was made for is gone */
    EG_INTERNAL = -10    /* a mistake of the library; please report it */
} eg_status;

/* Why an answer ended. */
typedef enum eg_finish {
    EG_GOES_ON = 0,
    EG_STOP = 1,         /* an end token or a stop string */
    EG_LENGTH = 2,       /* max_new_tokens, or the end of the cache */
    EG_CANCELLED = 3,
    EG_FAILED = 4        /* an error: eg_next returns its code behind this piece */
} eg_finish;

typedef uint64_t eg_model;
typedef uint64_t eg_request;

/* How a bundle is opened. */
typedef struct eg_options {
    size_t size;
    int32_t batch;               /* requests that run at once; 0: as the engine is for, or 8 */
    int32_t max_length;          /* tokens of prompt and answer; 0: the engine's own limit */
    int32_t threads;             /* of a CPU; 0: all cores */
    int32_t tensor_parallel;     /* ranks that the bundle must be for; 0: those that it is for */
    int32_t chunk;               /* tokens of prompts at once; 0: the default */
    int32_t max_waiting;         /* requests that may wait for a row; -1: the default */
    const char *weights_root;    /* where moved weights are; NULL: where the bundle says */
} eg_options;
#define EG_OPTIONS_INIT { sizeof(eg_options), 0, 0, 0, 0, 0, -1, NULL }

/* A token and what is added to its logit, -100 to 100, or minus infinity to forbid it. */
typedef struct eg_bias {
    int32_t token;
    float value;
} eg_bias;

/* How a prompt is continued; export_grok.runtime.GenerationParams has the same names. */
typedef struct eg_params {
    size_t size;
    int32_t max_new_tokens;      /* 0: to the end of the cache */
    int32_t top_k;               /* 0: all */
    float temperature;           /* 0: the most probable token each time */
    float top_p;                 /* 1: all */
    float min_p;                 /* 0: all */
    float repetition_penalty;    /* 1: none */
    uint64_t seed;
    int32_t ignore_eos;          /* not 0: go on behind an end token */
    int32_t logprobs;            /* most probable tokens told with each, 0 to 20; -1: none */
    const char *const *stop;     /* strings that end the answer and are not shown */
    size_t stop_count;
    const eg_bias *bias;
    size_t bias_count;
} eg_params;
#define EG_PARAMS_INIT \
    { sizeof(eg_params), 0, 0, 0.0f, 1.0f, 0.0f, 1.0f, 0, 0, -1, NULL, 0, NULL, 0 }

/* A token and its logprob: of the engine's own logits, before any parameter. */
typedef struct eg_logprob {
    int32_t token;
    float logprob;
} eg_logprob;

/* What one token added to an answer. What it points at is good until the next eg_next or
 * eg_release of the same request. */
typedef struct eg_piece {
    size_t size;
    const char *text;            /* whole characters; often none */
    size_t length;               /* bytes of it */
    int32_t token;               /* -1: an end without a token */
    int32_t finish;              /* eg_finish */
    float logprob;               /* of the token, if logprobs were asked for; else 0 */
    const eg_logprob *top;       /* the most probable ones, largest first */
    size_t top_count;
} eg_piece;
#define EG_PIECE_INIT { sizeof(eg_piece), NULL, 0, -1, EG_GOES_ON, 0.0f, NULL, 0 }

/* Tokens and times of a request, so far or in all. */
typedef struct eg_usage_t {
    size_t size;
    int64_t prompt_tokens;
    int64_t cached_tokens;       /* of these, those that were not computed again */
    int64_t new_tokens;
    double waited_seconds;
    double first_token_seconds;
    double decode_seconds;
} eg_usage_t;
#define EG_USAGE_INIT { sizeof(eg_usage_t), 0, 0, 0, 0.0, 0.0, 0.0 }

/* How busy a model is. */
typedef struct eg_load_t {
    size_t size;
    int64_t batch;
    int64_t running;
    int64_t waiting;
    int64_t cache_tokens;
    int64_t kept_tokens;
    int64_t capacity;
} eg_load_t;
#define EG_LOAD_INIT { sizeof(eg_load_t), 0, 0, 0, 0, 0, 0 }

/* Called with each piece, in the thread that called eg_stream; not 0 cancels the request,
 * and no more pieces come. */
typedef int (*eg_on_piece)(void *user, const eg_piece *piece);

/* The library's version, e.g. "0.1.0"; good for ever. Needs no interpreter. */
const char *eg_version(void);

/* EG_ABI_VERSION that the library was made with. */
int eg_abi_version(void);

/* Open a bundle with an engine. `options` may be NULL. Takes as long as loading does. */
eg_status eg_open(const char *bundle, const eg_options *options, eg_model *model);

/* Cancel all requests of a model, end its ranks, let its memory go. Its requests stay readable
 * until they are released. */
eg_status eg_close(eg_model model);

/* Begin to answer a prompt; returns at once. `params` may be NULL. */
eg_status eg_submit(
    eg_model model, const char *prompt, const eg_params *params, eg_request *request);

/* The same of token ids. */
eg_status eg_submit_tokens(
    eg_model model, const int32_t *tokens, size_t count, const eg_params *params,
    eg_request *request);

/* Wait for the next piece: EG_OK with one, EG_END behind the last, EG_TIMEOUT if none came in
 * `timeout_ms` (-1: without end), or the error that ended the answer. */
eg_status eg_next(eg_request request, int64_t timeout_ms, eg_piece *piece);

/* Call `on_piece` with every piece that is left; returns as eg_next does at its end, EG_END. */
eg_status eg_stream(eg_request request, eg_on_piece on_piece, void *user);

/* End an answer after the token that is being computed; its last piece says EG_CANCELLED. */
eg_status eg_cancel(eg_request request);

/* Tokens and times so far. */
eg_status eg_usage(eg_request request, eg_usage_t *usage);

/* Let a request go; cancels it if it goes on. */
eg_status eg_release(eg_request request);

/* How busy a model is now. */
eg_status eg_load(eg_model model, eg_load_t *load);

/* The model's metrics as Prometheus reads them (text format); needs the extra `metrics`. With
 * `buffer` NULL or too small: EG_TRUNCATED, and `length` without the zero. */
eg_status eg_metrics(eg_model model, char *buffer, size_t capacity, size_t *length);

/* Code and text of the last error in this thread; EG_OK and "" if there was none. The text is good
 * until this thread's next call. */
eg_status eg_last_error(const char **text);

#ifdef __cplusplus
}
#endif

#endif /* EXPORT_GROK_H */
