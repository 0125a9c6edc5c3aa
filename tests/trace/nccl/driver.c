/* Plays NCCL for the plugin: `driver LIBRARY VERSION SCENE`. Prints, as lines, what the plugin must have counted:
 *
 *     flow COMM CHANNEL PEER SIDE TIMES TOTAL READY TRANSMITTED DONE RECEIVED CONSUMED BYTES
 *     op COMM OP SEQ BYTES
 *     comm COMM RANK RANKS NODES NAME
 *
 * for all that have ended, sums over flows of the same place. The test compares them with the file. */
#include <stdlib.h>
#include <unistd.h>

#include "pieces.h"
#include "scenes.h"

int full_memory;

/* The plugin asks NCCL which version it is, and the kernel for room: both are played here. */
__attribute__((visibility("default"))) ncclResult_t ncclGetVersion(int *version) {
    const char *said = getenv("EVERTRAIN_TEST_VERSION");
    *version = said ? atoi(said) : 22907;
    return ncclSuccess;
}

__attribute__((visibility("default"))) int posix_fallocate(int file, off_t offset, off_t size) {
    if (full_memory)
        return 28; /* ENOSPC */
    return ftruncate(file, offset + size) ? 5 : 0;
}

int main(int count, char **arguments) {
    static const struct {
        const char *name;
        void (*play)(void);
    } scenes[] = {
        {"ring", scene_ring},       {"tree", scene_tree},     {"channels", scene_channels}, {"threads", scene_threads},
        {"repeats", scene_repeats}, {"kernels", scene_kernels}, {"foreign", scene_foreign}, {"collnet", scene_collnet},
        {"late", scene_late},       {"abort", scene_abort},   {"death", scene_death},       {"fork", scene_fork},
        {"odd", scene_odd},         {"p2p", scene_p2p},       {"comms", scene_comms},       {"crowd", scene_crowd},
        {"full", scene_full},       {"pipeline", scene_pipeline},
        {"bench", scene_bench},     {"world", scene_world},
    };
    if (count != 4)
        return 2;
    nccl = player_load(arguments[1], atoi(arguments[2]));
    for (size_t at = 0; at < sizeof scenes / sizeof *scenes; at++)
        if (!strcmp(scenes[at].name, arguments[3])) {
            scenes[at].play();
            return 0;
        }
    fprintf(stderr, "no scene %s\n", arguments[3]);
    return 2;
}
