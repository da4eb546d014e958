/* What the C files of the library share; nothing of it is seen outside. */

#ifndef EXPORT_GROK_INTERFACE_H
#define EXPORT_GROK_INTERFACE_H

#include <signal.h>

#include "export_grok.h"

/* start.c: the interpreter, begun by the first call and never ended. */

/* EG_OK if Python may be called; else EG_PYTHON, told. */
eg_status eg_started(void);

/* Let no signal that is sent to the process reach this thread, nor threads that it starts: the
 * host's handlers run in the host's threads, and a rank that died is no SIGPIPE. */
void eg_block_signals(sigset_t *before);
void eg_restore_signals(const sigset_t *before);

/* Whether Python may still be called: not in a process that was forked from the one that started
 * it, nor when a host has ended an interpreter of its own. */
int eg_goes_on(void);

/* end.c: the end of the program. */

/* Close all models before anything else ends that is registered by now. */
void eg_end_first(void);

/* Take note that this thread uses the library: in its exit() they are closed before all else. */
void eg_know_thread(void);

/* error.c: the last error of each thread. */

/* Take note of an error and return its code. */
__attribute__((format(printf, 2, 3)))
eg_status eg_tell(eg_status code, const char *format, ...);

/* The same of a whole text, for Python. */
eg_status eg_tell_text(eg_status code, const char *text);

/* api.py: the functions in Python, which take structures of this version, and no null pointers.
 * They are defined by cffi. */
eg_status eg_py_open(const char *bundle, const eg_options *options, eg_model *model);
eg_status eg_py_close(eg_model model);
eg_status eg_py_close_all(void);
eg_status eg_py_submit(
    eg_model model, const char *prompt, const eg_params *params, eg_request *request);
eg_status eg_py_submit_tokens(
    eg_model model, const int32_t *tokens, size_t count, const eg_params *params,
    eg_request *request);
eg_status eg_py_next(eg_request request, int64_t timeout_ms, eg_piece *piece);
eg_status eg_py_cancel(eg_request request);
eg_status eg_py_usage(eg_request request, eg_usage_t *usage);
eg_status eg_py_release(eg_request request);
eg_status eg_py_load(eg_model model, eg_load_t *load);
eg_status eg_py_metrics(eg_model model, char *buffer, size_t capacity, size_t *length);

#endif /* EXPORT_GROK_INTERFACE_H */
