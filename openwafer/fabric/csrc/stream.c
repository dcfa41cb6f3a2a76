/* Streams: the words of one send. They stay in the sender's memory until somebody writes there, and what an instruction
 * makes of a passing stream is computed when it is read: a wafer of PEs that all send at once needs its SRAM once. */
#include "engine.h"
#include <stdlib.h>
#include <string.h>

enum { MAX_DEPTH = 64, BLOCK = 512 }; /* instructions whose results wait to be computed; words computed at once */

Stream *new_stream(Engine *e, u32 size) {
    Stream *stream = allocate(e, sizeof(Stream) + 4 * (size_t)size);
    *stream = (Stream){.refs = 1, .size = size, .kind = STREAM_WORDS};
    stream->words = stream->own;
    return stream;
}

/* `size` elements of a PE's memory from `address` on, as they are now. */
Stream *lend(Engine *e, u32 pe, i32 address, i32 dtype, u32 size) {
    Stream *stream = allocate(e, sizeof(Stream));
    *stream = (Stream){.refs = 1, .size = size, .kind = STREAM_MEMORY, .bytes = (u8)type_bytes(dtype)};
    Stream **first = &e->pes[pe].loans;
    stream->memory = memory_of(e, pe, address);
    stream->next = *first;
    stream->link = first;
    if (*first) (*first)->link = &stream->next;
    *first = stream;
    return stream;
}

/* What the instruction `row` makes of `size` words of `in`; its other operand, if any, is in memory. */
Stream *derive(Engine *e, const i32 *row, Stream *in, u32 in_offset, Stream *operand, u32 operand_offset, u32 size) {
    if (in->depth == MAX_DEPTH) keep_words(e, in);
    Stream *stream = allocate(e, sizeof(Stream));
    *stream = (Stream){.refs = 1, .size = size, .kind = STREAM_DERIVED, .depth = (u8)(in->depth + 1), .row = row,
                       .in = in, .operand = operand, .in_offset = in_offset, .operand_offset = operand_offset};
    retain(in);
    if (operand) retain(operand);
    return stream;
}

/* Streams cross from band to band, so their counts are atomic. */
void retain(Stream *stream) { __atomic_fetch_add(&stream->refs, 1, __ATOMIC_RELAXED); }

static void return_loan(Stream *stream) {
    if (stream->next) stream->next->link = stream->link;
    *stream->link = stream->next;
    stream->link = NULL;
}

void release(Stream *stream) {
    if (!stream || __atomic_sub_fetch(&stream->refs, 1, __ATOMIC_ACQ_REL)) return;
    if (stream->kind == STREAM_MEMORY) {
        if (stream->link) return_loan(stream);
        else free((u8 *)stream->memory);
    } else if (stream->kind == STREAM_DERIVED) {
        release(stream->in);
        release(stream->operand);
    } else if (stream->words != stream->own)
        free(stream->words);
    free(stream);
}

static void copy_loan(Engine *e, Stream *stream) {
    size_t size = (size_t)stream->bytes * stream->size;
    u8 *copy = allocate(e, size);
    memcpy(copy, stream->memory, size);
    return_loan(stream);
    stream->memory = copy;
}

/* The PE is about to write its memory from `low` to `high`: whoever borrowed of it takes a copy. */
void before_write(Engine *e, u32 pe, const u8 *low, const u8 *high) {
    for (Stream *loan = e->pes[pe].loans, *next; loan; loan = next) {
        next = loan->next;
        if (loan->memory < high && loan->memory + (size_t)loan->bytes * loan->size > low) copy_loan(e, loan);
    }
}

static void derive_block(Engine *e, Stream *stream, u32 first, i32 count, u32 *to) {
    float a[BLOCK], b[BLOCK];
    const i32 *row = stream->row;
    i32 dtype = row[F_DTYPE];
    read_words(e, stream->in, stream->in_offset + first, (u32)count, to);
    words_to_elements(dtype, to, count, a);
    if (stream->operand) {
        const u8 *from = stream->operand->memory + (size_t)type_bytes(dtype) * (stream->operand_offset + first);
        load_elements(dtype, from, 1, count, b);
    }
    if (row[F_B] == KIND_FABRIC) compute(row[F_OP], dtype, count, b, a, NULL, a);
    else compute(row[F_OP], dtype, count, a, b, NULL, a);
    elements_to_words(dtype, to, count, a);
}

static void derive_words(Engine *e, Stream *stream, u32 first, u32 count, u32 *to) {
    for (u32 done = 0; done < count; done += BLOCK) {
        i32 part = count - done < BLOCK ? (i32)(count - done) : BLOCK;
        derive_block(e, stream, first + done, part, to + done);
    }
}

/* Make a stream independent of memory and of other streams. */
void keep_words(Engine *e, Stream *stream) {
    if (stream->kind == STREAM_MEMORY && stream->link) copy_loan(e, stream);
    if (stream->kind != STREAM_DERIVED) return;
    u32 *words = allocate(e, 4 * (size_t)stream->size);
    derive_words(e, stream, 0, stream->size, words);
    release(stream->in);
    release(stream->operand);
    stream->kind = STREAM_WORDS;
    stream->depth = 0;
    stream->words = words;
}

void read_words(Engine *e, Stream *stream, u32 first, u32 count, u32 *to) {
    if (stream->kind == STREAM_DERIVED && stream->refs > 1) keep_words(e, stream); /* others will read it too */
    if (stream->kind == STREAM_DERIVED) derive_words(e, stream, first, count, to);
    else if (stream->kind == STREAM_WORDS) memcpy(to, stream->words + first, 4 * (size_t)count);
    else if (stream->bytes == 4) memcpy(to, stream->memory + 4 * (size_t)first, 4 * (size_t)count);
    else
        for (u32 i = 0; i < count; i++) to[i] = ((const u16 *)stream->memory)[first + i];
}

u32 read_word(Engine *e, Stream *stream, u32 index) {
    u32 word;
    if (stream->kind == STREAM_DERIVED) keep_words(e, stream); /* the words after it will be read one by one too */
    read_words(e, stream, index, 1, &word);
    return word;
}
