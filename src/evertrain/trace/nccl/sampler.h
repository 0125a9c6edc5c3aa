/* The plugin's own thread: ten times a second it writes down what is open, what has ended, and how the threads do. */
#ifndef EVERTRAIN_SAMPLER_H
#define EVERTRAIN_SAMPLER_H
#include <stdbool.h>

#include "comms.h"

/* Everything here is called under this lock, which no callback of an operation or a flow ever takes. */
void ev_lock(void);
void ev_unlock(void);

bool ev_sampler_start(void);
void ev_sampler_wake(void);
/* A last look at what is open in the communicator, then nothing of it is open any more. */
void ev_sampler_close(struct ev_comm *comm);
/* In a forked child: the thread is the parent's. */
void ev_sampler_forget(void);
#endif
