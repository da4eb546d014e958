/* What the programs of the tests share: a check that names what failed, and small tools. */

#ifndef CHECK_H
#define CHECK_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <export_grok.h>

#define CHECK(law)                                                                 \
    do {                                                                           \
        if (!(law)) {                                                              \
            const char *told = "";                                                 \
            eg_status code = eg_last_error(&told);                                 \
            fprintf(stderr, "%s:%d: not so: %s\n(last error %d: %s)\n", __FILE__,  \
                    __LINE__, #law, (int)code, told);                              \
            exit(1);                                                               \
        }                                                                          \
    } while (0)

/* The call comes to `code`, and if that is an error its text has `part` in it. */
#define COMES_TO(code, part, call)                                                 \
    do {                                                                           \
        const char *text = NULL;                                                   \
        CHECK((call) == (code));                                                   \
        CHECK(eg_last_error(&text) == (code));                                     \
        CHECK(text != NULL && strstr(text, (part)) != NULL);                       \
    } while (0)

/* Whether bytes are whole characters in UTF-8. */
static inline int is_whole(const char *text, size_t length)
{
    size_t at = 0;
    while (at < length) {
        unsigned char lead = (unsigned char)text[at];
        size_t takes = lead < 0x80 ? 1 : lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
        if (takes == 0 || lead > 0xF4 || at + takes > length)
            return 0;
        for (size_t more = 1; more < takes; more++)
            if (((unsigned char)text[at + more] & 0xC0) != 0x80)
                return 0;
        at += takes;
    }
    return 1;
}

/* An answer as one string; free it. */
static inline char *answer_of(eg_model model, const char *prompt, const eg_params *params)
{
    eg_request request;
    eg_piece piece = EG_PIECE_INIT;
    size_t length = 0;
    char *text = calloc(1, 1);
    eg_status status;
    CHECK(text != NULL);
    CHECK(eg_submit(model, prompt, params, &request) == EG_OK);
    while ((status = eg_next(request, -1, &piece)) == EG_OK) {
        CHECK(is_whole(piece.text, piece.length));
        CHECK(piece.text[piece.length] == '\0');
        char *longer = realloc(text, length + piece.length + 1);
        CHECK(longer != NULL);
        text = longer;
        memcpy(text + length, piece.text, piece.length + 1);
        length += piece.length;
    }
    CHECK(status == EG_END);
    CHECK(eg_release(request) == EG_OK);
    return text;
}

#endif /* CHECK_H */
