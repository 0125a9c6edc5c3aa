#include "threads.h"

#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define MOST 64

static struct seen {
    uint32_t thread;
    bool noted;
    uint64_t t, cpu_ns, delay_ns;
} seen[MOST];

void ev_threads_note(uint32_t thread) {
    struct seen *place = NULL;
    for (struct seen *one = seen; one < seen + MOST; one++) {
        if (one->thread == thread) {
            one->noted = true;
            return;
        }
        if (!place && !one->thread)
            place = one;
    }
    if (place)
        *place = (struct seen){.thread = thread, .noted = true};
}

static bool read_file(uint32_t thread, const char *what, char *text, size_t size) {
    char path[64];
    snprintf(path, sizeof path, "/proc/self/task/%u/%s", thread, what);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return false;
    ssize_t got = read(file, text, size - 1);
    close(file);
    text[got > 0 ? got : 0] = 0;
    return got > 0;
}

static char state_of(uint32_t thread) {
    char text[512];
    if (!read_file(thread, "stat", text, sizeof text))
        return 'X';
    /* behind the name, which may hold anything */
    const char *name_end = strrchr(text, ')');
    return name_end && name_end[1] == ' ' ? name_end[2] : '?';
}

void ev_threads_tell(uint64_t now) {
    for (struct seen *one = seen; one < seen + MOST; one++) {
        if (!one->thread)
            continue;
        if (!one->noted) {
            one->thread = 0;
            continue;
        }
        one->noted = false;
        char text[128];
        unsigned long long cpu_ns = one->cpu_ns, delay_ns = one->delay_ns;
        if (read_file(one->thread, "schedstat", text, sizeof text) && sscanf(text, "%llu %llu", &cpu_ns, &delay_ns) != 2)
            continue;
        if (one->t) {
            union ev_record record = {.host = {
                .kind = EV_KIND_HOST, .device = ev_ring_device(), .rank = ev_ring_rank(), .peer = EV_NOBODY,
                .seq = one->thread, .t = now, .dt_us = (uint32_t)((now - one->t) / 1000), .threads = 1,
                .state = (uint8_t)state_of(one->thread), .cpu_us = (cpu_ns - one->cpu_ns) / 1000,
                .delay_us = (delay_ns - one->delay_ns) / 1000, .carrier = 255,
            }};
            ev_ring_append(&record);
        }
        one->t = now;
        one->cpu_ns = cpu_ns;
        one->delay_ns = delay_ns;
    }
}

void ev_threads_forget(void) { memset(seen, 0, sizeof seen); }
