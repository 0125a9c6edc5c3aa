/* Do the threads that serve flows run? A proxy thread that waits in good health spins near 100 %: its callbacks say
 * nothing while it waits, its processor time does. */
#ifndef EVERTRAIN_THREADS_H
#define EVERTRAIN_THREADS_H
#include <stdint.h>

#include "ring.h"

/* A thread that serves an open flow, in this round. */
void ev_threads_note(uint32_t thread);
/* One record for each of those, then a new round begins. */
void ev_threads_tell(uint64_t now);
void ev_threads_forget(void);
#endif
