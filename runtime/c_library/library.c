/* The functions of export_grok.h: they hold pointers and sizes to what the header asks, and hand
 * the rest to Python (api.py). */

#include <pthread.h>
#include <string.h>

#include "interface.h"
#include "made_for.h"

/* No structure will ever be so long: a size beyond it was never set. */
#define LONGEST_STRUCTURE 4096

/* Leave the function if a call of this header's own checks fails. */
#define TRY(call)                                                                                  \
    do {                                                                                           \
        eg_status tried = (call);                                                                  \
        if (tried != EG_OK)                                                                        \
            return tried;                                                                          \
    } while (0)

#define NEEDED(pointer) needed(pointer, #pointer)

static eg_status needed(const void *pointer, const char *name)
{
    return pointer != NULL ? EG_OK : eg_tell(EG_ARGUMENT, "`%s` is NULL; it must not be", name);
}

/* Hold a structure to having a size. */
static eg_status sized(const void *theirs, const char *name, size_t *size)
{
    TRY(needed(theirs, name));
    memcpy(size, theirs, sizeof *size);
    if (*size >= sizeof *size && *size <= LONGEST_STRUCTURE)
        return EG_OK;
    return eg_tell(
        EG_ARGUMENT,
        "`%s` has the size %zu; begin with the EG_..._INIT macro of its structure", name, *size);
}

/* Fill `own`, which holds the defaults, as far as their structure goes. */
static eg_status take(void *own, size_t length, const void *theirs, const char *name)
{
    size_t size;
    if (theirs == NULL)
        return EG_OK;
    TRY(sized(theirs, name, &size));
    memcpy(own, theirs, size < length ? size : length);
    return EG_OK;
}

/* Copy `own` into their structure as far as that goes; its size stays. */
static void give(void *theirs, size_t size, const void *own, size_t length)
{
    size_t end = size < length ? size : length;
    memcpy((char *)theirs + sizeof size, (const char *)own + sizeof size, end - sizeof size);
}

const char *eg_version(void)
{
    return EG_VERSION;
}

int eg_abi_version(void)
{
    return EG_ABI_VERSION;
}

eg_status eg_open(const char *bundle, const eg_options *options, eg_model *model)
{
    eg_options own = EG_OPTIONS_INIT;
    sigset_t before;
    TRY(NEEDED(model));
    *model = 0;
    TRY(NEEDED(bundle));
    TRY(take(&own, sizeof own, options, "options"));
    TRY(eg_started());
    eg_block_signals(&before);
    eg_status status = eg_py_open(bundle, &own, model);
    eg_restore_signals(&before);
    if (status == EG_OK)
        eg_end_first();
    return status;
}

eg_status eg_close(eg_model model)
{
    TRY(eg_started());
    return eg_py_close(model);
}

eg_status eg_submit(
    eg_model model, const char *prompt, const eg_params *params, eg_request *request)
{
    eg_params own = EG_PARAMS_INIT;
    TRY(NEEDED(request));
    *request = 0;
    TRY(NEEDED(prompt));
    TRY(take(&own, sizeof own, params, "params"));
    TRY(eg_started());
    return eg_py_submit(model, prompt, &own, request);
}

eg_status eg_submit_tokens(
    eg_model model, const int32_t *tokens, size_t count, const eg_params *params,
    eg_request *request)
{
    eg_params own = EG_PARAMS_INIT;
    TRY(NEEDED(request));
    *request = 0;
    if (count > 0)
        TRY(NEEDED(tokens));
    TRY(take(&own, sizeof own, params, "params"));
    TRY(eg_started());
    return eg_py_submit_tokens(model, tokens, count, &own, request);
}

eg_status eg_next(eg_request request, int64_t timeout_ms, eg_piece *piece)
{
    static pthread_once_t first = PTHREAD_ONCE_INIT;
    size_t size;
    eg_piece own = EG_PIECE_INIT;
    TRY(sized(piece, "piece", &size));
    give(piece, size, &own, sizeof own);
    TRY(eg_started());
    eg_status status = eg_py_next(request, timeout_ms, &own);
    if (status == EG_OK) {
        give(piece, size, &own, sizeof own);
        pthread_once(&first, eg_end_first);
    } else if (status == EG_END) {
        eg_end_first();
    }
    return status;
}

eg_status eg_stream(eg_request request, eg_on_piece on_piece, void *user)
{
    int wanted = 1;
    if (on_piece == NULL)
        return eg_tell(EG_ARGUMENT, "`on_piece` is NULL; it must not be");
    for (;;) {
        eg_piece piece = EG_PIECE_INIT;
        TRY(eg_next(request, -1, &piece));
        if (wanted && on_piece(user, &piece) != 0) {
            wanted = 0;
            (void)eg_cancel(request);
        }
    }
}

eg_status eg_cancel(eg_request request)
{
    TRY(eg_started());
    return eg_py_cancel(request);
}

eg_status eg_usage(eg_request request, eg_usage_t *usage)
{
    size_t size;
    eg_usage_t own = EG_USAGE_INIT;
    TRY(sized(usage, "usage", &size));
    TRY(eg_started());
    TRY(eg_py_usage(request, &own));
    give(usage, size, &own, sizeof own);
    return EG_OK;
}

eg_status eg_release(eg_request request)
{
    TRY(eg_started());
    return eg_py_release(request);
}

eg_status eg_load(eg_model model, eg_load_t *load)
{
    size_t size;
    eg_load_t own = EG_LOAD_INIT;
    TRY(sized(load, "load", &size));
    TRY(eg_started());
    TRY(eg_py_load(model, &own));
    give(load, size, &own, sizeof own);
    return EG_OK;
}

eg_status eg_metrics(eg_model model, char *buffer, size_t capacity, size_t *length)
{
    TRY(NEEDED(length));
    *length = 0;
    TRY(eg_started());
    return eg_py_metrics(model, buffer, buffer == NULL ? 0 : capacity, length);
}
