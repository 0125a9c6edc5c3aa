/* The file of this process: header, table, ring, as record.h lays them out. One thread at a time writes. */
#ifndef EVERTRAIN_RING_H
#define EVERTRAIN_RING_H
#include <stdbool.h>
#include <stdint.h>

#include "record.h"

#define EV_TABLE 2048u

union ev_record {
    struct ev_operation operation;
    struct ev_host host;
    struct ev_communicator communicator;
    unsigned char bytes[EV_RECORD_BYTES];
};

/* By the environment (see plugin.c); false: there is no room, or nobody has asked for it. */
bool ev_ring_open(char *why, size_t why_bytes);
bool ev_ring_is_open(void);
int32_t ev_ring_rank(void);
int16_t ev_ring_device(void);
void ev_ring_append(union ev_record *record);
/* A place of the table, from 1; 0: all are taken. */
uint32_t ev_ring_place(void);
void ev_ring_set(uint32_t place, union ev_record *record);
void ev_ring_free(uint32_t place);
void ev_ring_lost(uint64_t lost);
/* In a forked child: the file is the parent's. */
void ev_ring_forget(void);
#endif
