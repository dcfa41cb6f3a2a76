/* What happens when: a wheel of the next 4096 cycles, and a heap for what is later. */
#include "engine.h"
#include <stdlib.h>
#include <string.h>

static void put(Engine *e, u32 id, i32 time) {
    u32 slot = (u32)time % WHEEL;
    Bucket *bucket = e->wheel + slot;
    if (!bucket->last || bucket->last->count == CHUNK) {
        Chunk *chunk = e->free_chunk;
        if (chunk) e->free_chunk = chunk->next;
        else chunk = allocate(e, sizeof(Chunk));
        chunk->next = NULL;
        chunk->count = 0;
        if (bucket->last) bucket->last->next = chunk;
        else bucket->first = chunk;
        bucket->last = chunk;
        e->occupied[slot / 64] |= 1ull << (slot % 64);
    }
    bucket->last->ids[bucket->last->count++] = id;
}

static void heap_push(Engine *e, u64 key) {
    e->heap = grow(e, e->heap, &e->heap_room, e->heap_count + 1, sizeof(u64));
    u32 i = e->heap_count++;
    for (; i && e->heap[(i - 1) / 2] > key; i = (i - 1) / 2) e->heap[i] = e->heap[(i - 1) / 2];
    e->heap[i] = key;
}

static u64 heap_pop(Engine *e) {
    u64 top = e->heap[0], last = e->heap[--e->heap_count];
    u32 i = 0;
    for (;;) {
        u32 child = 2 * i + 1;
        if (child >= e->heap_count) break;
        if (child + 1 < e->heap_count && e->heap[child + 1] < e->heap[child]) child++;
        if (e->heap[child] >= last) break;
        e->heap[i] = e->heap[child];
        i = child;
    }
    e->heap[i] = last;
    return top;
}

void schedule(Engine *e, u32 id, i32 time) {
    if (!(id & ID_KIND)) e = owner(e, id);
    if (time <= e->now) abort(); /* our own invariant: the present is decided */
    if (time - e->now < WHEEL) put(e, id, time);
    else heap_push(e, (u64)(u32)time << 32 | id);
}

/* The next cycle with events, at most WHEEL - 1 ahead; NEVER if the wheel is empty. */
static i32 next_time(const Engine *e) {
    u32 start = (u32)(e->now + 1) % WHEEL;
    for (u32 step = 0; step <= WHEEL / 64; step++) {
        u32 word = (start / 64 + step) % (WHEEL / 64);
        u64 bits = e->occupied[word];
        if (step == 0) bits &= ~0ull << (start % 64);
        if (step == WHEEL / 64) bits &= start % 64 ? ~0ull >> (64 - start % 64) : 0;
        if (bits) {
            u32 slot = word * 64 + (u32)__builtin_ctzll(bits);
            return e->now + 1 + (i32)((slot + WHEEL - start) % WHEEL);
        }
    }
    return NEVER;
}

/* The cycle of the band's next event, or NEVER. */
i32 next_event(const Engine *e) {
    i32 t = next_time(e);
    return e->heap_count && (i32)(e->heap[0] >> 32) < t ? (i32)(e->heap[0] >> 32) : t;
}

/* The events of cycle t, which becomes the present: in a row, so that the loops over them can look ahead. */
void take_events(Engine *e, i32 t) {
    while (e->heap_count && (i32)(e->heap[0] >> 32) == t) put(e, (u32)heap_pop(e), t);
    u32 slot = (u32)t % WHEEL;
    Bucket events = e->wheel[slot];
    e->wheel[slot] = (Bucket){0};
    e->occupied[slot / 64] &= ~(1ull << (slot % 64));
    e->now = t;
    e->num_present = 0;
    for (const Chunk *chunk = events.first; chunk; chunk = chunk->next) {
        e->present = grow(e, e->present, &e->room_present, e->num_present + chunk->count, sizeof(u32));
        memcpy(e->present + e->num_present, chunk->ids, chunk->count * sizeof(u32));
        e->num_present += chunk->count;
    }
    e->events += e->num_present;
    if (!events.last) return;
    events.last->next = e->free_chunk;
    e->free_chunk = events.first;
}

static void free_chunks(Chunk *chunk) {
    while (chunk) {
        Chunk *next = chunk->next;
        free(chunk);
        chunk = next;
    }
}

void free_events(Engine *e) {
    for (u32 i = 0; i < WHEEL; i++) free_chunks(e->wheel[i].first);
    free_chunks(e->free_chunk);
    free(e->heap), free(e->present);
}
