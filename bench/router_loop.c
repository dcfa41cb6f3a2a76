/* The obvious mesh simulator, as a yardstick for speed: in every cycle every router looks at every colour it routes, and
 * moves at most one word over each link. Queues are bounded; decisions look at the state at the start of the cycle.
 * bench/fabric_speed.py runs it on the same streams as the engine. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { NORTH, EAST, SOUTH, WEST, RAMP, QUEUE = 8 };

typedef struct {
    uint32_t words[QUEUE];
    int32_t first, count;
} Queue;

typedef struct {
    int32_t width, num_pes, num_colours;
    const uint8_t *outputs;   /* [pe][colour]: directions out, 0 for no route */
    int32_t *to_send;         /* [pe][colour]: words the core still has to send */
    Queue *queues;            /* [pe][colour] */
    uint8_t *moves;           /* [pe][colour]: links used in this cycle */
    int64_t hops, received;
    uint32_t sum;             /* of all received words, so that values matter */
} Mesh;

static int32_t target_of(const Mesh *mesh, int32_t pe, int direction) {
    static const int32_t columns[4] = {0, 1, 0, -1}, rows[4] = {-1, 0, 1, 0};
    return pe + columns[direction] + rows[direction] * mesh->width;
}

static int has_room(const Mesh *mesh, int32_t pe, int32_t colour, uint8_t links) {
    for (int direction = 0; direction < RAMP; direction++)
        if (links >> direction & 1) {
            int32_t target = target_of(mesh, pe, direction);
            if (mesh->queues[target * mesh->num_colours + colour].count == QUEUE) return 0;
        }
    return 1;
}

static void decide(Mesh *mesh, int32_t pe, int64_t cycle) {
    uint8_t used = 0;
    for (int32_t i = 0; i < mesh->num_colours; i++) {
        int32_t colour = (int32_t)((i + cycle) % mesh->num_colours); /* round robin */
        int32_t index = pe * mesh->num_colours + colour;
        uint8_t links = mesh->outputs[index];
        mesh->moves[index] = 0;
        if (!links || !mesh->queues[index].count || used & links || !has_room(mesh, pe, colour, links)) continue;
        used |= links;
        mesh->moves[index] = links;
    }
}

static void push(Queue *queue, uint32_t word) { queue->words[(queue->first + queue->count++) % QUEUE] = word; }

static int commit(Mesh *mesh, int32_t pe) {
    int active = 0;
    for (int32_t colour = 0; colour < mesh->num_colours; colour++) {
        int32_t index = pe * mesh->num_colours + colour;
        Queue *queue = mesh->queues + index;
        uint8_t links = mesh->moves[index];
        if (links) {
            uint32_t word = queue->words[queue->first];
            queue->first = (queue->first + 1) % QUEUE;
            queue->count--;
            active = 1;
            for (int direction = 0; direction < RAMP; direction++)
                if (links >> direction & 1) {
                    push(mesh->queues + target_of(mesh, pe, direction) * mesh->num_colours + colour, word);
                    mesh->hops++;
                }
            if (links >> RAMP & 1) mesh->received++, mesh->sum += word;
        }
        if (mesh->to_send[index] && queue->count < QUEUE) {
            push(queue, (uint32_t)mesh->to_send[index]--);
            active = 1;
        }
    }
    return active;
}

/* Runs until nothing moves; returns the cycles. results: words over links, words received, their sum. */
int64_t router_loop(int32_t width, int32_t height, int32_t num_colours, const uint8_t *outputs, int32_t *to_send,
                    int64_t *results) {
    size_t size = (size_t)width * (size_t)height * (size_t)num_colours;
    Mesh mesh = {.width = width, .num_pes = width * height, .num_colours = num_colours, .outputs = outputs,
                 .to_send = to_send, .queues = calloc(size, sizeof(Queue)), .moves = calloc(size, 1)};
    int64_t cycle = 0;
    if (!mesh.queues || !mesh.moves) return -1;
    for (int active = 1; active; cycle++) {
        active = 0;
        for (int32_t pe = 0; pe < mesh.num_pes; pe++) decide(&mesh, pe, cycle);
        for (int32_t pe = 0; pe < mesh.num_pes; pe++) active |= commit(&mesh, pe);
    }
    results[0] = mesh.hops, results[1] = mesh.received, results[2] = mesh.sum;
    free(mesh.queues), free(mesh.moves);
    return cycle;
}
