#include "ring.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define LEAST_RECORDS 512u

static struct {
    unsigned char *map;
    uint64_t capacity;
    uint64_t written;
    uint64_t in_table[EV_TABLE]; /* number of the newest record of each place */
    bool taken[EV_TABLE];
    uint32_t taken_count, hint;
    int32_t rank;
    int16_t device;
} ring;

static uint32_t crc_table[256];

static void make_crc_table(void) {
    for (uint32_t value = 0; value < 256; value++) {
        uint32_t crc = value;
        for (int bit = 0; bit < 8; bit++)
            crc = crc & 1 ? crc >> 1 ^ 0xedb88320u : crc >> 1;
        crc_table[value] = crc;
    }
}

static uint32_t crc32_of(const void *data, size_t size) {
    const unsigned char *bytes = data;
    uint32_t crc = ~0u;
    for (size_t at = 0; at < size; at++)
        crc = crc_table[(crc ^ bytes[at]) & 255] ^ crc >> 8;
    return ~crc;
}

static int64_t number_of(const char *variable, int64_t otherwise) {
    const char *text = getenv(variable);
    char *end = NULL;
    long long value = text ? strtoll(text, &end, 10) : 0;
    return text && end != text && !*end ? value : otherwise;
}

static void put_text(char *to, size_t size, const char *text) {
    /* zeros behind it, so that readers see the text alone */
    memset(to, 0, size);
    if (text)
        memcpy(to, text, strnlen(text, size));
}

static uint64_t clock_ns(clockid_t which) {
    struct timespec now;
    clock_gettime(which, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

bool ev_ring_open(char *why, size_t why_bytes) {
    const char *prefix = getenv("EVERTRAIN_TRACE_RING");
    if (!prefix || !*prefix) {
        snprintf(why, why_bytes, "EVERTRAIN_TRACE_RING is not set");
        return false;
    }
    char path[4096], fresh[4096 + 8];
    if (snprintf(path, sizeof path, "%s-nccl-%d.ring", prefix, (int)getpid()) >= (int)sizeof path) {
        snprintf(why, why_bytes, "the path of the trace is too long");
        return false;
    }
    /* nobody finds a file that is half made */
    snprintf(fresh, sizeof fresh, "%s.new", path);
    int file = open(fresh, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (file < 0) {
        snprintf(why, why_bytes, "%s: %s", path, strerror(errno));
        return false;
    }
    int64_t asked = number_of("EVERTRAIN_TRACE_BYTES", 4 << 20);
    uint64_t capacity = asked > 0 ? (uint64_t)asked / EV_RECORD_BYTES : 0;
    void *map = MAP_FAILED;
    int wrong = ENOSPC;
    for (; capacity >= LEAST_RECORDS; capacity /= 4) {
        size_t size = EV_HEADER_BYTES + (EV_TABLE + capacity) * EV_RECORD_BYTES;
        if ((wrong = posix_fallocate(file, 0, (off_t)size))) {
            /* every page now: one that is missing later would be SIGBUS in the rank. A smaller one may fit */
            if (ftruncate(file, 0) < 0)
                break;
            continue;
        }
        map = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        wrong = errno;
        break;
    }
    close(file);
    if (map == MAP_FAILED) {
        unlink(fresh);
        snprintf(why, why_bytes, "%s: no room for it: %s", path, strerror(wrong));
        return false;
    }
    make_crc_table();
    memset(&ring, 0, sizeof ring);
    ring.map = map;
    ring.capacity = capacity;
    ring.rank = (int32_t)number_of("RANK", EV_NOBODY);
    ring.device = (int16_t)number_of("LOCAL_RANK", -1);

    struct ev_header header = {
        .layout = EV_LAYOUT,
        .record_bytes = EV_RECORD_BYTES,
        .capacity = capacity,
        .table = EV_TABLE,
        .writer = EV_WRITER_NCCL,
        .rank = ring.rank,
        .pid = (uint32_t)getpid(),
        .term = number_of("EVERTRAIN_TRACE_TERM", 0),
        .attempt = number_of("EVERTRAIN_TRACE_ATTEMPT", 0),
        .monotonic_ns = clock_ns(CLOCK_MONOTONIC),
        .wall_ns = clock_ns(CLOCK_REALTIME),
    };
    memcpy(header.magic, EV_MAGIC, sizeof header.magic);
    put_text(header.node, sizeof header.node, getenv("EVERTRAIN_TRACE_NODE"));
    put_text(header.job, sizeof header.job, getenv("EVERTRAIN_TRACE_JOB"));
    header.crc = crc32_of(&header, offsetof(struct ev_header, crc));
    memcpy(ring.map, &header, sizeof header);
    if (rename(fresh, path) == 0)
        return true;
    snprintf(why, why_bytes, "%s: %s", path, strerror(errno));
    unlink(fresh);
    ev_ring_forget();
    return false;
}

bool ev_ring_is_open(void) { return ring.map != NULL; }
int32_t ev_ring_rank(void) { return ring.rank; }
int16_t ev_ring_device(void) { return ring.device; }
void ev_ring_forget(void) { ring.map = NULL; }

static void store(unsigned char *to, union ev_record *record, uint64_t number) {
    record->operation.number = number;
    record->operation.crc = crc32_of(record, offsetof(struct ev_operation, crc));
    record->operation.check = (uint32_t)number;
    memcpy(to, record, EV_RECORD_BYTES);
}

static void store_counter(size_t at, uint64_t value) {
    atomic_store_explicit((_Atomic uint64_t *)(void *)(ring.map + at), value, memory_order_release);
}

void ev_ring_append(union ev_record *record) {
    uint64_t number = ++ring.written;
    uint64_t place = EV_TABLE + (number - 1) % ring.capacity;
    store(ring.map + EV_HEADER_BYTES + place * EV_RECORD_BYTES, record, number);
    store_counter(EV_HEAD_AT, number);
}

uint32_t ev_ring_place(void) {
    while (ring.taken_count < EV_TABLE - 1) {
        ring.hint = ring.hint % (EV_TABLE - 1) + 1;
        if (!ring.taken[ring.hint]) {
            ring.taken[ring.hint] = true;
            ring.taken_count++;
            return ring.hint;
        }
    }
    return 0;
}

void ev_ring_set(uint32_t place, union ev_record *record) {
    store(ring.map + EV_HEADER_BYTES + (size_t)place * EV_RECORD_BYTES, record, ++ring.in_table[place]);
}

void ev_ring_free(uint32_t place) {
    memset(ring.map + EV_HEADER_BYTES + (size_t)place * EV_RECORD_BYTES, 0, EV_RECORD_BYTES);
    ring.taken[place] = false;
    ring.taken_count--;
}

void ev_ring_lost(uint64_t lost) { store_counter(EV_LOST_AT, lost); }
