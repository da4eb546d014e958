/* The interpreter: begun by the first call that needs it, for all threads, and never ended.
 *
 * It is isolated. A service must not be steered by PYTHONPATH, PYTHONHOME or the current folder
 * of whoever starts it, so nothing of them is read: the interpreter is the one that the library was
 * made with, by its path, and finds its own packages. UTF-8 is its encoding whatever the locale,
 * signal handlers are the host's, and so are standard input and output.
 *
 * A host that has an interpreter already shares it. */

#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <unistd.h>

#include "interface.h"
#include "made_for.h"

#define AGAIN "; run export-grok c-library again, with the Python that is to be used"

/* Made by cffi, in the file of the functions that are Python's. */
PyMODINIT_FUNC PyInit__export_grok(void);

static pthread_once_t once = PTHREAD_ONCE_INIT;
static volatile sig_atomic_t forked = 0;
static char failure[2048] = "";

static void fail(const char *what, const char *why)
{
    snprintf(failure, sizeof failure, "%s%s%s" AGAIN, what, *why ? ": " : "", why);
}

/* Tell the error that Python has set, and clear it. */
static void fail_as_python(const char *what)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    PyObject *text = value == NULL ? NULL : PyObject_Str(value);
    const char *why = text == NULL ? NULL : PyUnicode_AsUTF8(text);
    fail(what, why == NULL ? "no reason was given" : why);
    PyErr_Clear();
    Py_XDECREF(text);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
}

static void in_child(void)
{
    forked = 1;
}

/* Packages that are compiled look for Python's functions among those that all libraries see. A
 * host that loaded this one by dlopen, for itself alone, loaded Python's for itself alone too. */
static void show_python(void)
{
    Dl_info library;
    if (dladdr((void *)(uintptr_t)Py_IsInitialized, &library) != 0 && library.dli_fname != NULL)
        (void)dlopen(library.dli_fname, RTLD_NOW | RTLD_GLOBAL | RTLD_NOLOAD);
}

static PyStatus configured(PyConfig *config)
{
    PyPreConfig before;
    PyPreConfig_InitIsolatedConfig(&before);
    before.utf8_mode = 1;
    PyStatus status = Py_PreInitialize(&before);
    PyConfig_InitIsolatedConfig(config);
    config->pathconfig_warnings = 0;
    if (!PyStatus_Exception(status))
        status = PyConfig_SetBytesString(config, &config->program_name, EG_EXECUTABLE);
    if (!PyStatus_Exception(status))
        status = PyConfig_SetBytesString(config, &config->executable, EG_EXECUTABLE);
    return status;
}

/* Begin an interpreter; this thread then holds its lock. */
static int begin(void)
{
    if (access(EG_EXECUTABLE, X_OK) != 0) {
        fail("the library was made for the Python " EG_EXECUTABLE ", which is gone", "");
        return -1;
    }
    if (access(EG_STANDARD_LIBRARY "/os.py", R_OK) != 0) {
        fail("Python's own modules are gone from " EG_STANDARD_LIBRARY, "");
        return -1;
    }
    PyConfig config;
    PyStatus status = configured(&config);
    struct sigaction interrupt;
    sigaction(SIGINT, NULL, &interrupt);
    if (!PyStatus_Exception(status))
        status = Py_InitializeFromConfig(&config);
    PyConfig_Clear(&config);
    if (PyStatus_Exception(status)) {
        fail("the Python " EG_EXECUTABLE " does not start",
             status.err_msg == NULL ? "no reason was given" : status.err_msg);
        return -1;
    }
    /* Whoever first imports this module has Ctrl-C taken from the host, whatever was configured. */
    Py_XDECREF(PyImport_ImportModule("_signal"));
    PyErr_Clear();
    sigaction(SIGINT, &interrupt, NULL);
    return 0;
}

static int is_made_for(const char *version)
{
    int major = 0, minor = 0;
    return sscanf(version, "%d.%d", &major, &minor) == 2 && major == PY_MAJOR_VERSION
        && minor == PY_MINOR_VERSION;
}

/* Load the functions that are in Python and tie them to those that are declared in C. */
static void connect_api(void)
{
    PyObject *api = NULL, *done = NULL;
    PyObject *made = PyInit__export_grok();
    if (made != NULL)
        api = PyImport_ImportModule("export_grok.runtime.c_library.api");
    if (api != NULL)
        done = PyObject_CallMethod(api, "connect", "Os", made, EG_VERSION);
    if (done == NULL)
        fail_as_python("the Python " EG_EXECUTABLE " does not load export-grok");
    Py_XDECREF(done);
    Py_XDECREF(api);
    if (failure[0] != '\0')
        Py_XDECREF(made); /* else it is kept: it holds the functions */
}

static void start(void)
{
    sigset_t before;
    eg_block_signals(&before);
    pthread_atfork(NULL, NULL, in_child);
    show_python();
    if (Py_IsInitialized()) {
        if (is_made_for(Py_GetVersion())) {
            PyGILState_STATE state = PyGILState_Ensure();
            connect_api();
            PyGILState_Release(state);
        } else {
            fail("the library was made for another Python than this program runs", PY_VERSION);
        }
    } else if (begin() == 0) {
        connect_api();
        PyEval_SaveThread(); /* from now on any thread may take the lock */
    }
    eg_restore_signals(&before);
}

eg_status eg_started(void)
{
    pthread_once(&once, start);
    if (forked)
        return eg_tell(
            EG_PYTHON,
            "this process was forked from one that uses the library; use it in that one, or "
            "start a program of its own with exec");
    if (failure[0] != '\0')
        return eg_tell(EG_PYTHON, "%s", failure);
    if (!eg_goes_on())
        return eg_tell(EG_PYTHON, "this program has ended its Python; call before that");
    eg_know_thread();
    return EG_OK;
}

int eg_goes_on(void)
{
    return !forked && Py_IsInitialized();
}

void eg_block_signals(sigset_t *before)
{
    /* Those that a thread causes itself stay, and a profiler's. */
    static const int own[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT, SIGPROF};
    sigset_t blocked;
    sigfillset(&blocked);
    for (size_t each = 0; each < sizeof own / sizeof *own; each++)
        sigdelset(&blocked, own[each]);
    pthread_sigmask(SIG_BLOCK, &blocked, before);
}

void eg_restore_signals(const sigset_t *before)
{
    pthread_sigmask(SIG_SETMASK, before, NULL);
}
