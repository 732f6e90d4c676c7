/* Runs a compiled candidate on prepared inputs; built once by backends/c.py.
 *
 *   runner limit CPU_SECONDS MEMORY_BYTES FILE_BYTES PROGRAM ARGUMENTS...
 *   runner call LIBRARY PLAN INPUTS RESULTS CPU_MS WALL_MS
 *
 * "limit" sets resource limits and becomes PROGRAM (the compiler).
 *
 * "call" is two processes. The supervisor owns the inputs and the results; the worker loads the candidate and shares
 * with the supervisor nothing but the arena: the buffers of one call, each between two guard bands. For every call the
 * supervisor refreshes the buffers, poisons `out`, asks the worker, then copies `out` away, and only then looks at
 * guards and inputs.
 *
 * Times are processor time of the worker, all its threads together: a busy machine does not slow a candidate down. The
 * worker measures the call; the supervisor reads the kernel's own account of the worker from one answer to the next, less
 * what that is without a candidate, which a candidate cannot reach, and which leaves no time in between for work ahead.
 *
 * Plan: 64-bit integers. Number of calls; then for every call: number of inputs n, n times (offset in INPUTS, bytes),
 * bytes of out, poison word, number of sizes k, k sizes.
 * Results: for every call a Record, then the outs one after the other, each rounded up to 64 bytes.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#if __has_include(<linux/landlock.h>)
#include <linux/landlock.h>
#endif
#include <linux/seccomp.h>
#include <poll.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/personality.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { GUARD = 16384, ALIGN = 64, MAX_ARGUMENTS = 40, WORKER_MEMORY = 1 << 30 };
enum { COMMANDS = 3, REPLIES = 4, ARENA = 5, LIBRARY = 6 }; /* the worker's descriptors */
enum { NOT_RUN, OK, CRASHED, TIMED_OUT, EXITED, GUARD_CHANGED, INPUT_CHANGED, NOT_LOADED };

typedef struct { int64_t status, detail, worker_ns, supervisor_ns; } Record;
typedef struct { int64_t count, pointers, arguments[MAX_ARGUMENTS], bytes[MAX_ARGUMENTS], cpu_ms, dry; } Command;
typedef struct { int64_t loaded, ns; char error[240]; } Reply;

static int64_t now(clockid_t clock) {
    struct timespec t;
    if (clock_gettime(clock, &t)) return 0;
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static size_t rounded(size_t bytes) { return (bytes + ALIGN - 1) / ALIGN * ALIGN; }

/* Our own failure: exit code 3, which the parent turns into an InfrastructureError. */
static void fail(const char *what) {
    fprintf(stderr, "runner: %s: %s\n", what, strerror(errno));
    exit(3);
}

static void limit(int what, rlim_t value) {
    struct rlimit r = {value, value};
    setrlimit(what, &r);
}

static int read_all(int fd, void *to, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
        ssize_t n = read(fd, (char *)to + done, bytes - done);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return 0;
        done += (size_t)n;
    }
    return 1;
}

/* ---------------------------------------------------------------- the worker */

#if defined(__x86_64__)
#define MACHINE AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define MACHINE AUDIT_ARCH_AARCH64
#endif

#define LOAD(field) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, field))
#define RETURN(value) BPF_STMT(BPF_RET | BPF_K, (value))
#define ALLOW(name) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_##name, 0, 1), RETURN(SECCOMP_RET_ALLOW)
/* allowed if (argument & mask) == value */
#define ALLOW_IF(name, argument, mask, value)                                                              \
    BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_##name, 0, 5), LOAD(args[argument]),                           \
        BPF_STMT(BPF_ALU | BPF_AND | BPF_K, (mask)), BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (value), 0, 1),   \
        RETURN(SECCOMP_RET_ALLOW), LOAD(nr)

/* Nothing can be opened but the candidate's library: neither the inputs to come nor, under /proc, the memory of the
 * processes above, which know the expected outputs. Without Landlock (Linux before 5.13) files stay readable. */
static void hide_files(void) {
#if defined(SYS_landlock_create_ruleset) && defined(LANDLOCK_ACCESS_FS_READ_FILE)
    uint64_t opening = LANDLOCK_ACCESS_FS_EXECUTE | LANDLOCK_ACCESS_FS_READ_FILE | LANDLOCK_ACCESS_FS_READ_DIR;
    struct landlock_ruleset_attr handled = {.handled_access_fs = opening};
    struct landlock_path_beneath_attr library = {.allowed_access = LANDLOCK_ACCESS_FS_READ_FILE, .parent_fd = LIBRARY};
    int rules = (int)syscall(SYS_landlock_create_ruleset, &handled, sizeof handled, 0);
    if (rules < 0) return;
    syscall(SYS_landlock_add_rule, rules, LANDLOCK_RULE_PATH_BENEATH, &library, 0);
    syscall(SYS_landlock_restrict_self, rules, 0);
    close(rules);
#endif
}

/* What a computation needs: memory, threads of this process, clocks. No processes, no sockets, no files. */
static void seal(void) {
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    hide_files();
#ifdef MACHINE
    struct sock_filter filter[] = {
        LOAD(arch), BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, MACHINE, 1, 0), RETURN(SECCOMP_RET_KILL_PROCESS), LOAD(nr),
        ALLOW(read), ALLOW(write), ALLOW(close), ALLOW(mmap), ALLOW(munmap), ALLOW(mprotect), ALLOW(mremap),
        ALLOW(madvise), ALLOW(brk), ALLOW(futex), ALLOW(exit), ALLOW(exit_group), ALLOW(rt_sigaction),
        ALLOW(rt_sigprocmask), ALLOW(rt_sigreturn), ALLOW(sigaltstack), ALLOW(clock_gettime), ALLOW(clock_getres),
        ALLOW(gettimeofday), ALLOW(nanosleep), ALLOW(clock_nanosleep), ALLOW(sched_yield), ALLOW(sched_getaffinity),
        ALLOW(sched_setaffinity), ALLOW(getcpu), ALLOW(fstat), ALLOW(newfstatat), ALLOW(lseek), ALLOW(pread64),
        ALLOW(readlinkat), ALLOW(set_robust_list), ALLOW(set_tid_address), ALLOW(rseq), ALLOW(membarrier),
        ALLOW(getrandom), ALLOW(getpid), ALLOW(gettid), ALLOW(tgkill), ALLOW(uname), ALLOW(sysinfo), ALLOW(setitimer),
        ALLOW(getrusage), ALLOW(restart_syscall),
#ifdef __x86_64__
        ALLOW(time), ALLOW(readlink), ALLOW(access), ALLOW(stat), ALLOW(arch_prctl), ALLOW(getrlimit),
        ALLOW_IF(open, 1, O_ACCMODE | O_CREAT | O_TRUNC, O_RDONLY),
#endif
        ALLOW_IF(openat, 2, O_ACCMODE | O_CREAT | O_TRUNC, O_RDONLY),
        ALLOW_IF(clone, 0, 0x00010000 /* CLONE_THREAD */, 0x00010000),
        /* glibc falls back from clone3 to clone only on this error */
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone3, 0, 1), RETURN(SECCOMP_RET_ERRNO | ENOSYS),
        RETURN(SECCOMP_RET_ERRNO | EPERM),
    };
    struct sock_fprog program = {sizeof filter / sizeof filter[0], filter};
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
#endif
}

typedef int64_t A;
typedef void (*Kernel)(A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A, A,
                       A, A, A, A, A, A);

/* Every argument is a pointer or an integer: in the calling conventions of Linux each takes one 64-bit register or slot,
 * and arguments beyond those that the callee knows are harmless. */
static void invoke(Kernel f, const A *a) {
    f(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15], a[16], a[17],
      a[18], a[19], a[20], a[21], a[22], a[23], a[24], a[25], a[26], a[27], a[28], a[29], a[30], a[31], a[32], a[33],
      a[34], a[35], a[36], a[37], a[38], a[39]);
}

static volatile unsigned char sink;

/* Page tables and caches start warm, as they do for the reference, whose arrays live in the process that times it. */
static void touch(const unsigned char *from, int64_t bytes) {
    unsigned char seen = 0;
    for (int64_t i = 0; i < bytes; i += ALIGN) seen ^= from[i];
    sink = seen;
}

static void arm(int64_t ms) {
    struct itimerval timer = {{0, 0}, {ms / 1000, ms % 1000 * 1000}};
    setitimer(ITIMER_PROF, &timer, NULL);
}

static void answer(const Reply *reply) {
    if (write(REPLIES, reply, sizeof *reply) != sizeof *reply) _exit(9);
}

static int worker(int64_t arena_bytes) {
    unsigned char *arena = mmap(NULL, (size_t)arena_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, ARENA, 0);
    Command command;
    Reply reply = {.loaded = 1};
    Kernel kernel = NULL;
    if (arena == MAP_FAILED) return 9;
    close(ARENA);
    limit(RLIMIT_AS, (rlim_t)arena_bytes + WORKER_MEMORY);
    limit(RLIMIT_FSIZE, 0);
    limit(RLIMIT_NOFILE, 32);
    seal();
    while (read_all(COMMANDS, &command, sizeof command)) {
        A arguments[MAX_ARGUMENTS] = {0};
        for (int64_t i = 0; i < command.count; i++) {
            arguments[i] = command.arguments[i] + (i < command.pointers ? (A)arena : 0);
            if (i < command.pointers) touch((unsigned char *)arguments[i], command.bytes[i]);
        }
        arm(command.cpu_ms);
        if (command.dry) {
            arm(0);
            answer(&reply);
            continue;
        }
        if (!kernel) {
            void *library = dlopen("/proc/self/fd/6", RTLD_NOW | RTLD_LOCAL);
            kernel = library ? (Kernel)dlsym(library, "kernel") : NULL;
            if (!kernel) {
                reply.loaded = 0;
                snprintf(reply.error, sizeof reply.error, "%s", dlerror());
                answer(&reply);
                return 0;
            }
        }
        /* the clock of the whole process only ticks while a timer is armed; other threads show in the supervisor's */
        int64_t start = now(CLOCK_THREAD_CPUTIME_ID);
        invoke(kernel, arguments);
        reply.ns = now(CLOCK_THREAD_CPUTIME_ID) - start;
        arm(0);
        answer(&reply);
    }
    return 0;
}

/* ---------------------------------------------------------------- the supervisor */

static pid_t child;
static unsigned char *arena;

static void *mapped(const char *path, size_t *bytes, int flags) {
    struct stat info;
    int fd = open(path, flags);
    if (fd < 0 || fstat(fd, &info)) fail(path);
    *bytes = (size_t)info.st_size;
    if (!*bytes) return NULL;
    void *at = mmap(NULL, *bytes, flags == O_RDONLY ? PROT_READ : PROT_READ | PROT_WRITE,
                    flags == O_RDONLY ? MAP_PRIVATE : MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) fail("mmap");
    close(fd);
    return at;
}

static void start_worker(char *program, const char *library, int64_t arena_bytes, int fds[2]) {
    int commands[2], replies[2], memory = memfd_create("arena", MFD_CLOEXEC);
    int code = open(library, O_RDONLY | O_CLOEXEC);
    char size[32];
    if (pipe2(commands, O_CLOEXEC) || pipe2(replies, O_CLOEXEC)) fail("pipe");
    if (code < 0) fail(library);
    if (memory < 0 || ftruncate(memory, arena_bytes)) fail("memfd");
    arena = mmap(NULL, (size_t)arena_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    if (arena == MAP_FAILED) fail("mmap");
    snprintf(size, sizeof size, "%lld", (long long)arena_bytes);
    if ((child = fork()) < 0) fail("fork");
    if (child == 0) {
        char *arguments[] = {"worker", "worker", size, NULL}, *environment[] = {"OMP_NUM_THREADS=1", "LC_ALL=C", NULL};
        int from[] = {commands[0], replies[1], memory, code}, to[] = {COMMANDS, REPLIES, ARENA, LIBRARY};
        setpgid(0, 0);
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        for (int i = 0; i < 4; i++) from[i] = fcntl(from[i], F_DUPFD, 20);
        for (int i = 0; i < 4; i++) dup2(from[i], to[i]);
        for (int fd = LIBRARY + 1; fd < 64; fd++) close(fd);
        int null = open("/dev/null", O_RDWR);
        for (int fd = 0; fd < 3; fd++) dup2(null, fd);
        close(null);
        personality(ADDR_NO_RANDOMIZE); /* undefined behaviour should at least repeat itself */
        execve(program, arguments, environment);
        _exit(9);
    }
    setpgid(child, child);
    close(commands[0]), close(replies[1]), close(memory), close(code);
    fds[0] = replies[0], fds[1] = commands[1];
}

static void stop_worker(void) {
    kill(-child, SIGKILL);
    kill(child, SIGKILL);
    while (waitpid(-1, NULL, 0) > 0) {}
}

/* Sends a command; returns a status, with the signal or exit code in *detail. */
static int64_t ask(int fds[2], const Command *command, Reply *reply, int64_t wall_ms, int64_t *detail) {
    struct pollfd wait = {.fd = fds[0], .events = POLLIN};
    int state = 0;
    if (write(fds[1], command, sizeof *command) == sizeof *command) {
        int ready = poll(&wait, 1, (int)wall_ms);
        if (ready == 0) return TIMED_OUT;
        if (ready > 0 && read_all(fds[0], reply, sizeof *reply)) return OK;
    }
    if (waitpid(child, &state, 0) < 0) fail("waitpid");
    if (WIFSIGNALED(state)) {
        *detail = WTERMSIG(state);
        return *detail == SIGPROF || *detail == SIGXCPU ? TIMED_OUT : CRASHED;
    }
    *detail = WEXITSTATUS(state);
    return EXITED;
}

/* Guards are signalling NaNs: reading too far shows in the result, and a guard that was computed with turns quiet. */
static const unsigned char guard_word[4] = {0xA5, 0xA5, 0xA5, 0x7F};

static void put_guard(size_t from, size_t to) {
    for (; from < to && from % 8; from++) arena[from] = guard_word[from % 4];
    for (; from + 4 <= to; from += 4) memcpy(arena + from, guard_word, 4);
    for (; from < to; from++) arena[from] = guard_word[from % 4];
}

static int guard_changed(size_t from, size_t to) {
    for (; from < to && from % 8; from++)
        if (arena[from] != guard_word[from % 4]) return 1;
    for (; from + 4 <= to; from += 4)
        if (memcmp(arena + from, guard_word, 4)) return 1;
    for (; from < to; from++)
        if (arena[from] != guard_word[from % 4]) return 1;
    return 0;
}

/* Lays the buffers of a call into the arena (or only says how large it must be, while there is none). */
static size_t lay_out(const int64_t *plan, const unsigned char *inputs, Command *command) {
    int64_t n = plan[0], out_bytes = plan[1 + 2 * n], poison = plan[2 + 2 * n], k = plan[3 + 2 * n];
    size_t at = GUARD;
    if (n + 1 + k > MAX_ARGUMENTS) fail("too many arguments");
    memset(command, 0, sizeof *command);
    for (int64_t i = 0; i <= n; i++) {
        size_t bytes = (size_t)(i < n ? plan[2 + 2 * i] : out_bytes);
        command->arguments[i] = (int64_t)at, command->bytes[i] = (int64_t)bytes;
        if (arena) {
            put_guard(at - GUARD, at);
            if (i < n) memcpy(arena + at, inputs + plan[1 + 2 * i], bytes);
            else for (size_t j = 0; j < bytes; j++) arena[at + j] = (unsigned char)(poison >> 8 * (j % 8));
            put_guard(at + bytes, at + rounded(bytes) + GUARD);
        }
        at += rounded(bytes) + 2 * GUARD; /* two bands, so that it is clear which buffer was overrun */
    }
    for (int64_t i = 0; i < k; i++) command->arguments[n + 1 + i] = plan[4 + 2 * n + i];
    command->pointers = n + 1, command->count = n + 1 + k;
    return at;
}

static void inspect(const int64_t *plan, const unsigned char *inputs, const Command *command, Record *record) {
    int64_t n = plan[0];
    for (int64_t i = 0; i <= n; i++) {
        size_t at = (size_t)command->arguments[i], bytes = (size_t)command->bytes[i];
        if (guard_changed(at - GUARD, at) || guard_changed(at + bytes, at + rounded(bytes) + GUARD)) {
            record->status = GUARD_CHANGED, record->detail = i;
            return;
        }
    }
    for (int64_t i = 0; i < n; i++)
        if (memcmp(arena + command->arguments[i], inputs + plan[1 + 2 * i], (size_t)command->bytes[i])) {
            record->status = INPUT_CHANGED, record->detail = i;
            return;
        }
}

/* Processor time of a call without the kernel: the calls of a timing are alike, so the first stands for all. It is taken
 * while the candidate is not loaded yet and cannot make it look longer. */
static int64_t dry_run(int fds[2], clockid_t clock, const int64_t *part, const unsigned char *inputs) {
    Command command;
    Reply reply;
    int64_t least = INT64_MAX, detail = 0, before = 0;
    for (int i = 0; i < 6; i++) {
        lay_out(part, inputs, &command);
        command.dry = 1;
        if (ask(fds, &command, &reply, 20000, &detail) != OK) fail("the worker does not answer");
        int64_t after = now(clock);
        if (i && after - before < least) least = after - before;
        before = after;
    }
    return least;
}

static int supervise(char *program, char **argv) {
    size_t plan_bytes, input_bytes, result_bytes, at;
    int64_t *plan = mapped(argv[1], &plan_bytes, O_RDONLY), calls = plan[0], arena_bytes = 0, wall = atoll(argv[5]);
    unsigned char *inputs = mapped(argv[2], &input_bytes, O_RDONLY), *results = mapped(argv[3], &result_bytes, O_RDWR);
    Record *records = (Record *)results;
    Command command;
    Reply reply;
    int fds[2];
    const int64_t *part = plan + 1;
    for (int64_t i = 0; i < calls; i++, part += 4 + 2 * part[0] + part[3 + 2 * part[0]]) {
        int64_t bytes = (int64_t)lay_out(part, inputs, &command);
        if (bytes > arena_bytes) arena_bytes = bytes;
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    signal(SIGPIPE, SIG_IGN);
    start_worker(program, argv[0], arena_bytes, fds);
    int64_t before, after;
    clockid_t clock;
    if (clock_getcpuclockid(child, &clock)) fail("clock_getcpuclockid");
    int64_t dry = dry_run(fds, clock, plan + 1, inputs);
    before = now(clock);
    part = plan + 1, at = (size_t)calls * sizeof(Record);
    for (int64_t i = 0; i < calls; i++, part += 4 + 2 * part[0] + part[3 + 2 * part[0]]) {
        Record *record = records + i;
        lay_out(part, inputs, &command);
        command.cpu_ms = atoll(argv[4]);
        int64_t status = ask(fds, &command, &reply, wall, &record->detail);
        after = now(clock);
        record->supervisor_ns = after - before - dry, record->worker_ns = reply.ns;
        before = after;
        if (status == OK && !reply.loaded) {
            status = NOT_LOADED;
            reply.error[sizeof reply.error - 1] = 0;
            memcpy(results + at, reply.error, strnlen(reply.error, sizeof reply.error));
        } else if (status == OK) {
            memcpy(results + at, arena + command.arguments[part[0]], (size_t)part[1 + 2 * part[0]]);
        }
        record->status = status;
        if (status != OK) break;
        inspect(part, inputs, &command, record);
        if (record->status != OK) break;
        at += rounded((size_t)part[1 + 2 * part[0]]);
    }
    stop_worker();
    return 0;
}

int main(int argc, char **argv) {
    limit(RLIMIT_CORE, 0);
    if (argc == 3 && !strcmp(argv[1], "worker")) return worker(atoll(argv[2]));
    if (argc == 8 && !strcmp(argv[1], "call")) return supervise(argv[0], argv + 2);
    if (argc > 5 && !strcmp(argv[1], "limit")) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        limit(RLIMIT_CPU, (rlim_t)atoll(argv[2]));
        limit(RLIMIT_AS, (rlim_t)atoll(argv[3]));
        limit(RLIMIT_FSIZE, (rlim_t)atoll(argv[4]));
        execvp(argv[5], argv + 5);
        fail(argv[5]);
    }
    fprintf(stderr, "usage: see the top of runner.c\n");
    return 2;
}
