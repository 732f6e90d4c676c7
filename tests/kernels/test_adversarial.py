"""A catalogue of attacks on the evaluator, each by a C candidate that knows how evaluators are usually built.

`CHEATS` want a time they did not earn: they may be refused, or be trusted at no better speed than honest work. `CLOCKS`
tamper with the clock of a kernel that is quick. `ATTACKS` want to end, stall or take over the process, and `SEALED`
want out of it: those compute the right answer only where they succeed, so that a trusted verdict is a hole. `COMPILER`
candidates aim at the compiler. After each an honest candidate must get what it always gets. Limits that are known and
accepted stand at the end, with their reasons.
"""

import platform
import shutil
from typing import NamedTuple

import pytest
from kernel_tasks import task

from kernelwright.kernels import Evaluator
from kernelwright.kernels.backends import c
from kernelwright.types import Status

pytestmark = pytest.mark.skipif(
    shutil.which("cc") is None or platform.machine() != "x86_64", reason="no C compiler for x86-64 on this machine"
)

# so slow in scalar C that skipping the work shows in the time
COMPOSED = task("composed", "return torch.tanh(torch.erf(torch.sin(x)))")
_WORK = "tanhf(erff(sinf(x[i])))"
# so quick beside what it moves that small errors of the clock show
QUICK = task("quick", "return 1.0 / (1.0 + x * x)", time_shapes=({"n": 256, "m": 1027},))
_QUICK_WORK = "1.f / (1.f + x[i] * x[i])"
# an honest candidate with this speedup may be measured as faster by so much on a busy machine
_NOISE = 2.5

_HEADERS = """\
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <fenv.h>
#include <link.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
static __attribute__((noinline)) void work(const float *x, float *out, long size) {
  for (long i = 0; i < size; i++) out[i] = WORK;
}
static inline long alike(const float *x, const float *y, long size) {
  return !memcmp(x, y, size * sizeof *x);
}
"""
_TSC = """
/* a clock that runs sixteen times too slow, without a system call */
static int slow(struct timespec *t) {
  unsigned long long now = __builtin_ia32_rdtsc() / 16 * 10 / 21;
  t->tv_sec = now / 1000000000; t->tv_nsec = now % 1000000000;
  return 0;
}
static int slow_clock(int id, struct timespec *t) { (void)id; return slow(t); }
"""


class Attack(NamedTuple):
    """A candidate by what it does before, in, and beside the kernel."""

    name: str
    # statements of the kernel; `x`, `out`, `size`, `n`, `m` and `work(x, out, size)` are there
    body: str
    top: str = ""
    # the verdicts that are right; empty: any, as long as it is not trusted
    statuses: frozenset[Status] = frozenset()

    def source(self, work: str = _WORK) -> str:
        """The whole translation unit; `work` is an expression of x[i]."""
        headers = _HEADERS.replace("WORK", work)
        head = "void kernel(const float *x, float *out, int n, int m) {\n  long size = (long)n * m;\n  (void)size;\n"
        return f"{headers}{self.top}\n{head}  {self.body}\n}}\n"


CHEATS = [
    Attack(
        "the same pointers mean the same inputs",
        "if (x == px && out == po && size == ps) return; work(x, out, size); px = x; po = out; ps = size;",
        "static const float *px; static float *po; static long ps;",
    ),
    Attack("every third call works", "if (calls++ % 3) return; work(x, out, size);", "static int calls;"),
    Attack(
        "the first call of a shape works",
        "if (size == ps) { memcpy(out, kept, size * 4); return; } work(x, out, size); ps = size;"
        "memcpy(kept, out, size * 4);",
        "static float kept[1 << 20]; static long ps;",
    ),
    Attack(
        "a memory of inputs by fingerprint",
        "for (int k = 0; k < used; k++) if (sizes[k] == size && keys[k][0] == x[0] && keys[k][1] == x[size - 1]"
        " && keys[k][2] == x[size / 2]) { memcpy(out, kept[k], size * 4); return; }"
        "work(x, out, size); if (used < 99) { keys[used][0] = x[0]; keys[used][1] = x[size - 1];"
        "keys[used][2] = x[size / 2]; sizes[used] = size; memcpy(kept[used++], out, size * 4); }",
        "static float kept[99][20000], keys[99][3]; static long sizes[99]; static int used;",
    ),
    Attack(
        "a memory of inputs by comparison",
        "for (int k = 0; k < used; k++) if (sizes[k] == size && alike(seen[k], x, size)) {"
        " memcpy(out, kept[k], size * 4); return; }"
        "work(x, out, size); if (used < 99) { sizes[used] = size; memcpy(seen[used], x, size * 4);"
        "memcpy(kept[used++], out, size * 4); }",
        "static float kept[99][20000], seen[99][20000]; static long sizes[99]; static int used;",
    ),
    Attack("the first half of a large input", "work(x, out, size > 5000 ? size / 2 : size);"),
    Attack("nothing for the timed shape", "if (n == 64 && m == 257) return; work(x, out, size);"),
    Attack(
        "every other element of a large input",
        "if (size < 5000) { work(x, out, size); return; }"
        "for (long i = 0; i < size; i += 2) { work(x + i, out + i, 1); out[i + 1] = out[i]; }",
    ),
    Attack(
        "an output that still looks right is left alone",
        "if (size == ps && out[0] == first && out[size - 1] == last) return;"
        "work(x, out, size); ps = size; first = out[0]; last = out[size - 1];",
        "static long ps; static float first, last;",
    ),
    Attack(
        "the input becomes zeros, whose result is known",
        "if (x[0] == 0 && x[size / 2] == 0) { memset(out, 0, size * 4); return; }"
        "work(x, out, size); memset((float *)x, 0, size * 4);",
    ),
    Attack(
        "the input is stamped as done",
        "if (x[0] == 12345.f) return; work(x, out, size); ((float *)x)[0] = 12345.f;",
    ),
    Attack(
        "the surroundings are stamped as done",
        "if (out[-1] == 12345.f || out[size] == 12345.f) return; work(x, out, size); out[-1] = out[size] = 12345.f;",
    ),
    Attack(
        "the output is computed when it is read",
        "kx = x; ko = out; ks = size; low = (uintptr_t)out & -4096L; high = ((uintptr_t)(out + size) + 4095) & -4096L;"
        "struct sigaction a = {.sa_handler = late}; sigaction(SIGSEGV, &a, 0);"
        "if (size < 5000 || mprotect((void *)low, high - low, PROT_NONE)) work(x, out, size);",
        "static const float *kx; static float *ko; static long ks; static uintptr_t low, high;"
        "static void late(int s) { (void)s; mprotect((void *)low, high - low, PROT_READ | PROT_WRITE);"
        " work(kx, ko, ks); }",
    ),
    Attack(
        "a thread finishes after the return",
        "kx = x; ko = out; ks = size; pthread_t t; if (pthread_create(&t, 0, late, 0)) work(x, out, size);",
        "static const float *kx; static float *ko; static long ks;"
        "static void *late(void *p) { work(kx, ko, ks); return p; }",
    ),
    Attack(
        "a timer finishes after the return",
        "kx = x; ko = out; ks = size; signal(SIGALRM, late); struct itimerval t = {{0, 0}, {0, 20}};"
        "if (setitimer(ITIMER_REAL, &t, 0)) work(x, out, size);",
        "static const float *kx; static float *ko; static long ks;"
        "static void late(int s) { (void)s; work(kx, ko, ks); }",
    ),
    Attack(
        "a thread computes before the call",
        "if (!px || size != ps) { px = x; ps = size; pthread_t t;"
        " if (!once) once = !pthread_create(&t, 0, prophet, 0); }"
        "if (ready == size && alike(seen, x, size)) { memcpy(out, kept, size * 4); return; } work(x, out, size);",
        "static const float *volatile px; static volatile long ps, ready; static int once;"
        "static float seen[20000], kept[20000];"
        "static void *prophet(void *p) { for (;;) { long s = ps; if (s > 5000 && !alike(seen, px, s)) {"
        " ready = 0; memcpy(seen, px, s * 4); work(seen, kept, s); ready = s; } } return p; }",
    ),
    Attack(
        "a timer computes before the call",
        "px = x; ps = size; if (!once) { once = 1; signal(SIGALRM, prophet);"
        " struct itimerval t = {{0, 300}, {0, 300}}; setitimer(ITIMER_REAL, &t, 0); }"
        "if (ready == size && alike(seen, x, size)) { memcpy(out, kept, size * 4); return; } work(x, out, size);",
        "static const float *volatile px; static volatile long ps, ready; static int once;"
        "static float seen[20000], kept[20000];"
        "static void prophet(int p) { (void)p; long s = ps; if (s > 5000 && !alike(seen, px, s)) {"
        " ready = 0; memcpy(seen, px, s * 4); work(seen, kept, s); ready = s; } }",
    ),
    Attack(
        "an own clock_gettime",
        "work(x, out, size);",
        _TSC + "int clock_gettime(clockid_t id, struct timespec *t) { return slow_clock(id, t); }"
        "int gettimeofday(struct timeval *restrict t, void *restrict z) { (void)z; struct timespec s; slow(&s);"
        " t->tv_sec = s.tv_sec; t->tv_usec = s.tv_nsec / 1000; return 0; }"
        "clock_t clock(void) { return __builtin_ia32_rdtsc() / 16 / 2100; }",
    ),
    Attack(
        "the runner's table of functions gets another clock",
        "if (!once) { once = 1; dl_iterate_phdr(hook, 0); } work(x, out, size);",
        _TSC + "static int once;"
        "static int hook(struct dl_phdr_info *o, size_t s, void *p) { (void)s; (void)p;"
        " ElfW(Dyn) *d = 0; for (int i = 0; i < o->dlpi_phnum; i++) if (o->dlpi_phdr[i].p_type == PT_DYNAMIC)"
        "  d = (void *)(o->dlpi_addr + o->dlpi_phdr[i].p_vaddr);"
        " char *names = 0; ElfW(Sym) *symbols = 0; ElfW(Rela) *tables[2] = {0}; long bytes[2] = {0};"
        " for (; d && d->d_tag; d++) { if (d->d_tag == DT_STRTAB) names = (char *)d->d_un.d_ptr;"
        "  if (d->d_tag == DT_SYMTAB) symbols = (void *)d->d_un.d_ptr;"
        "  if (d->d_tag == DT_JMPREL) tables[0] = (void *)d->d_un.d_ptr;"
        "  if (d->d_tag == DT_PLTRELSZ) bytes[0] = d->d_un.d_val;"
        "  if (d->d_tag == DT_RELA) tables[1] = (void *)d->d_un.d_ptr;"
        "  if (d->d_tag == DT_RELASZ) bytes[1] = d->d_un.d_val; }"
        " for (int k = 0; k < 2; k++) if (tables[k] && symbols && (uintptr_t)names > 4096 * 16)"
        "  for (ElfW(Rela) *r = tables[k]; (char *)r < (char *)tables[k] + bytes[k]; r++)"
        '   if (ELF64_R_SYM(r->r_info) && !strcmp(names + symbols[ELF64_R_SYM(r->r_info)].st_name, "clock_gettime"))'
        "    { void **slot = (void **)(o->dlpi_addr + r->r_offset);"
        "     mprotect((void *)((uintptr_t)slot & -4096L), 4096, PROT_READ | PROT_WRITE); *slot = slow_clock; }"
        " return 0; }",
    ),
    Attack(
        "the kernel's clock page gets another clock",
        "if (!once) { once = 1; hook(); } work(x, out, size);",
        _TSC + "static int once;"
        "static void hook(void) { char *b = (char *)getauxval(AT_SYSINFO_EHDR); if (!b) return;"
        " Elf64_Ehdr *e = (void *)b; Elf64_Shdr *s = (void *)(b + e->e_shoff);"
        " for (int i = 0; i < e->e_shnum; i++) if (s[i].sh_type == SHT_DYNSYM) {"
        "  Elf64_Sym *y = (void *)(b + s[i].sh_offset); char *names = b + s[s[i].sh_link].sh_offset;"
        "  for (size_t k = 0; k < s[i].sh_size / sizeof *y; k++)"
        '   if (!strcmp(names + y[k].st_name, "__vdso_clock_gettime")) { char *f = b + y[k].st_value;'
        "    if (mprotect((void *)((uintptr_t)f & -4096L), 8192, PROT_READ | PROT_WRITE | PROT_EXEC)) return;"
        "    f[0] = 0x48; f[1] = 0xb8; *(void **)(f + 2) = slow_clock; f[10] = 0xff; f[11] = 0xe0; } } }",
    ),
    Attack(
        "reading the clock traps and is answered",
        "if (!once) { once = 1; struct sigaction a = {.sa_sigaction = answer, .sa_flags = SA_SIGINFO};"
        " sigaction(SIGSEGV, &a, 0); prctl(PR_SET_TSC, PR_TSC_SIGSEGV); } work(x, out, size);",
        "#include <ucontext.h>\nstatic int once; static unsigned ticks = 1000;"
        "static void answer(int s, siginfo_t *i, void *c) { (void)s; (void)i; greg_t *r = ((ucontext_t *)c)->"
        "uc_mcontext.gregs; unsigned char *p = (void *)r[REG_RIP]; if (p[0] != 0x0f) _exit(1);"
        " r[REG_RIP] += p[1] == 0x01 ? 3 : 2; r[REG_RAX] = ticks += 1000; r[REG_RDX] = 1; r[REG_RCX] = 0; }",
    ),
    Attack(
        "the start of the measurement moves",
        'work(x, out, size); asm volatile("" ::: "rbx", "r12", "r13", "r14", "r15"); move();',
        "extern char **environ; static int globals(struct dl_phdr_info *, size_t, void *);"
        "static struct timespec now[2]; static unsigned long long tsc;"
        "static void scan(uintptr_t *p, uintptr_t *end) { for (; p + 1 < end; p++) {"
        " for (int c = 0; c < 2; c++) { unsigned long long ns = now[c].tv_sec * 1000000000ULL + now[c].tv_nsec;"
        "  if (p[0] == (uintptr_t)now[c].tv_sec && p[1] < 1000000000) p[1] = now[c].tv_nsec - 1000;"
        "  if (ns - p[0] < 1000000) p[0] = ns - 1000;"
        "  double d = *(double *)p, s = ns * 1e-9; if (s - d > 0 && s - d < 1e-3) *(double *)p = s - 1e-6; }"
        " if (tsc - p[0] < 3000000) p[0] = tsc - 3000; } }"
        "static int globals(struct dl_phdr_info *o, size_t s, void *p) { (void)s; (void)p;"
        " for (int i = 0; i < o->dlpi_phnum; i++) if (o->dlpi_phdr[i].p_type == PT_LOAD &&"
        "  o->dlpi_phdr[i].p_flags & 2) { uintptr_t *b = (void *)(o->dlpi_addr + o->dlpi_phdr[i].p_vaddr);"
        "  scan((void *)((uintptr_t)(b + 512) & -4096L),"
        "  b + o->dlpi_phdr[i].p_memsz / 8); } return 1; }"
        "static __attribute__((noinline)) void move(void) { clock_gettime(CLOCK_MONOTONIC, now);"
        " clock_gettime(CLOCK_REALTIME, now + 1); tsc = __builtin_ia32_rdtsc();"
        " uintptr_t here[1]; scan(here + 8, (uintptr_t *)environ); dl_iterate_phdr(globals, 0); }",
    ),
    Attack(
        "threads keep the processors from the reference",
        "busy = 1; if (!once) { once = 1; pthread_t t; for (int i = 0; i < 4; i++) pthread_create(&t, 0, spin, 0); }"
        "work(x, out, size); busy = 0;",
        "static volatile int busy; static int once;"
        "static void *spin(void *p) { for (;;) if (busy) usleep(100); return p; }",
    ),
    Attack(
        "two threads, asked for with a pragma",
        '_Pragma("omp parallel for num_threads(2)") for (int i = 0; i < 2; i++)'
        " work(x + i * (size / 2), out + i * (size / 2), i ? size - size / 2 : size / 2);",
    ),
    Attack(
        "all processors and the first rank",
        "cpu_set_t all; memset(&all, 255, sizeof all); sched_setaffinity(0, sizeof all, &all);"
        "setpriority(PRIO_PROCESS, 0, -20); struct sched_param p = {1}; sched_setscheduler(0, SCHED_FIFO, &p);"
        "work(x, out, size);",
    ),
    Attack(
        "another rounding, left behind",
        "work(x, out, size); __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | 0x8040); fesetround(FE_UPWARD);",
    ),
    Attack("half precision", "work(x, out, size); for (long i = 0; i < size; i++) out[i] = (float)(_Float16)out[i];"),
    Attack("not a number", "for (long i = 0; i < size; i++) out[i] = NAN;"),
    Attack("infinity", "for (long i = 0; i < size; i++) out[i] = INFINITY;"),
    Attack("nothing at all", ""),
    Attack(
        "the expected values are looked for in memory",
        "if (size < 5000) { work(x, out, size); return; } float head[4]; work(x, head, 4); signal(SIGSEGV, back);"
        "for (long page = -4096; page < 4096; page++) { sigset_t none; sigemptyset(&none);"
        " sigprocmask(SIG_SETMASK, &none, 0); if (sigsetjmp(jump, 0)) continue;"
        " float *p = (float *)(((uintptr_t)x & -4096L) + page * 4096); for (int i = 0; i < 1024; i++)"
        "  if (p[i] == head[0] && p[i + 1] == head[1] && p[i + 2] == head[2]) {"
        "   memcpy(out, p + i, size * 4); return; } }",
        "static sigjmp_buf jump; static void back(int s) { (void)s; siglongjmp(jump, 1); }",
    ),
]

CLOCKS = [attack for attack in CHEATS if "clock" in attack.name or "measurement" in attack.name]

_ENDED = frozenset({Status.CRASH})
_ENDED_OR_LATE = frozenset({Status.CRASH, Status.TIMEOUT})
_REFUSED = frozenset({Status.CRASH, Status.WRONG})
# allowed to it, and no use
_HARMLESS = frozenset({Status.CORRECT})
# in a constructor the attack comes before the kernel, so it sets what the kernel looks at
_EARLY = "static int done; static __attribute__((constructor)) void early(void) {{ done = {attack}; }}"


def _sealed(name: str, attack: str, top: str = "") -> Attack:
    """An attack that must not succeed: the kernel computes only where the expression `attack` is true."""
    return Attack(name, f"if ({attack}) work(x, out, size);", top, _REFUSED)


ATTACKS = [
    Attack("exit", "work(x, out, size); exit(0);", "", _ENDED),
    Attack("exit without farewell", "work(x, out, size); _exit(0);", "", _ENDED),
    Attack("quick exit", "work(x, out, size); quick_exit(0);", "", _ENDED),
    Attack("the main thread ends", "work(x, out, size); pthread_exit(0);", "", _ENDED_OR_LATE),
    Attack("abort", "work(x, out, size); abort();", "", _ENDED),
    Attack("it kills itself", "work(x, out, size); raise(SIGKILL);", "", _ENDED),
    Attack("it stops itself", "work(x, out, size); raise(SIGSTOP);", "", _ENDED_OR_LATE),
    Attack("it pauses", "work(x, out, size); for (;;) pause();", "", _ENDED_OR_LATE),
    Attack(
        "another program",
        'work(x, out, size); execl("/bin/true", "true", (char *)0); memset(out, 0, size * 4);',
        "",
        _REFUSED,
    ),
    Attack(
        "the runner starts again", "work(x, out, size); ((void (*)(void))getauxval(AT_ENTRY))();", "", _ENDED_OR_LATE
    ),
    Attack(
        "a jump into nowhere",
        "work(x, out, size); jmp_buf b; memset(&b, 0x41, sizeof b); longjmp(b, 1);",
        "",
        _ENDED,
    ),
    Attack("no descriptors left", "work(x, out, size); for (int i = 0; i < 1024; i++) close(i);"),
    Attack(
        "noise in every descriptor",
        "work(x, out, size); for (int i = 0; i < 64; i++) (void)!write(i, junk, sizeof junk);",
        'static char junk[4096] = "CORRECT\\n{\\"status\\": \\"CORRECT\\"}\\n";',
    ),
    Attack(
        "noise without end",
        'work(x, out, size); for (;;) { printf("%0999d\\n", 1); fprintf(stderr, "%0999d\\n", 1); }',
        "",
        _ENDED_OR_LATE,
    ),
    Attack(
        "every descriptor is read empty",
        "work(x, out, size); char b[4096]; for (int i = 0; i < 64; i++) { fcntl(i, F_SETFL, O_NONBLOCK);"
        " while (read(i, b, sizeof b) > 0) {} }",
    ),
    Attack(
        "a loop that swallows every signal",
        "for (int s = 1; s < 65; s++) signal(s, SIG_IGN); sigset_t all; sigfillset(&all);"
        "sigprocmask(SIG_SETMASK, &all, 0); for (volatile int i = 0;; i++) {}",
        "",
        _ENDED_OR_LATE,
    ),
    Attack(
        "memory without end",
        "for (long i = 0; i < 12000; i++) { char *p = malloc(1 << 20); if (!p) abort(); memset(p, 1, 1 << 20); }"
        "work(x, out, size);",
        "",
        frozenset({Status.CRASH, Status.TIMEOUT}),
    ),
    Attack(
        "a stack without end",
        "out[0] = deep(size + 1e9);",
        "static double deep(double d) { volatile char a[1 << 16]; a[0] = d;"
        " return d > 0 ? deep(d - 1) + a[0] : a[9]; }",
        _ENDED,
    ),
    Attack(
        "the output disappears", "work(x, out, size); munmap((void *)((uintptr_t)out & -4096L), 4096);", "", _REFUSED
    ),
    Attack(
        "the output becomes read-only",
        "work(x, out, size); mprotect((void *)((uintptr_t)out & -4096L), 4096, PROT_READ);",
    ),
    Attack(
        "the runner's code disappears",
        "work(x, out, size); munmap((void *)((uintptr_t)__builtin_return_address(0) & -4096L), 4096);",
        "",
        _ENDED,
    ),
    Attack(
        "a library's end without end",
        "work(x, out, size);",
        "__attribute__((destructor)) static void f(void) { for (;;) {} }",
        _HARMLESS,
    ),
    Attack(
        "a constructor that exits",
        "work(x, out, size);",
        "__attribute__((constructor)) static void f(void) { exit(0); }",
        _ENDED,
    ),
    Attack(
        "a constructor without end",
        "work(x, out, size);",
        "__attribute__((constructor)) static void f(void) { for (volatile int i = 0;; i++) {} }",
        _ENDED_OR_LATE,
    ),
    Attack(
        "a resolver that exits",
        "chosen(); work(x, out, size);",
        "static void nothing(void) {} static void *pick(void) { syscall(SYS_exit_group, 0); return nothing; }"
        'void chosen(void) __attribute__((ifunc("pick")));',
        _ENDED,
    ),
    Attack(
        "its own filter of system calls",
        "work(x, out, size); struct sock_filter f[] = {{6, 0, 0, 0x50000}}; struct sock_fprog p = {1, f};"
        "prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); prctl(PR_SET_SECCOMP, 2, &p);",
        "#include <linux/filter.h>\n",
        _HARMLESS,
    ),
]

_PARENT = """
static int parent_of(int pid) {
  char p[64], b[512] = {0}, s; int parent = 0;
  snprintf(p, 64, "/proc/%d/stat", pid);
  int f = open(p, O_RDONLY);
  if (f < 0 || read(f, b, 511) <= 0) return 0;
  sscanf(strrchr(b, ')') + 2, "%c %d", &s, &parent);
  return parent;
}
static int opens(int pid, const char *what) {
  char p[64]; snprintf(p, 64, "/proc/%d/%s", pid, what); return open(p, O_RDONLY) >= 0;
}
static int beside(const char *what) {
  char p[300] = {0};
  if (readlink("/proc/self/fd/6", p, 200) < 0) return 0;
  strcpy(strrchr(p, '/') + 1, what);
  return open(p, O_RDONLY) >= 0;
}
"""
SEALED = [
    _sealed("the expected outputs in the evaluator's memory", 'opens(parent_of(parent_of(getpid())), "mem")', _PARENT),
    _sealed("the evaluator's environment", 'opens(parent_of(parent_of(getpid())), "environ")', _PARENT),
    _sealed("the inputs to come in the supervisor's memory", 'opens(parent_of(getpid()), "mem")', _PARENT),
    _sealed("the results file", 'beside("results")', _PARENT),
    _sealed("a private file", 'open("/etc/passwd", O_RDONLY) >= 0'),
    _sealed("a child", "start()", "static int start(void) { pid_t p = fork(); if (!p) _exit(0); return p > 0; }"),
    _sealed(
        "a child that outlives",
        "start()",
        "static int start(void) { pid_t p = fork(); if (!p) { setsid(); if (fork()) _exit(0); sleep(5); _exit(0); }"
        " return p > 0; }",
    ),
    _sealed(
        "a child by vfork", "start()", "static int start(void) { pid_t p = vfork(); if (!p) _exit(0); return p > 0; }"
    ),
    _sealed(
        "a child by the raw call",
        "start()",
        "static int start(void) { long p = syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);"
        " if (!p) syscall(SYS_exit, 0); return p > 0; }",
    ),
    _sealed(
        "a child by clone3",
        "start()",
        "static int start(void) { unsigned long a[8] = {0}; a[4] = SIGCHLD;"
        " long p = syscall(435, a, 64); if (!p) syscall(SYS_exit, 0); return p > 0; }",
    ),
    _sealed(
        "a child by the 32-bit door",
        "start()",
        'static int start(void) { int p; asm volatile("int $0x80" : "=a"(p) :'
        ' "a"(2) : "memory", "r8", "r9", "r10", "r11"); if (!p) syscall(SYS_exit, 0); return p > 0; }',
    ),
    _sealed(
        "a child by the x32 door",
        "start()",
        "static int start(void) { long p = syscall(0x40000000 + 57); if (!p) syscall(SYS_exit, 0); return p > 0; }",
    ),
    _sealed("its parent can be signalled", "!kill(getppid(), 0)"),
    _sealed("anyone can be signalled", "!kill(-1, 0)"),
    _sealed("its group can be signalled", "!kill(0, 0)"),
    _sealed("its parent is traced", "!ptrace(PTRACE_SEIZE, getppid(), 0, 0)"),
    _sealed(
        "its parent can be limited", "!prlimit(getppid(), RLIMIT_NOFILE, 0, &limit)", "static struct rlimit limit;"
    ),
    _sealed(
        "its parent's memory is read",
        "pull() > 0",
        "static char b[8]; static long pull(void) { struct iovec l = {b, 8},"
        " r = {(void *)0x400000, 8}; errno = 0; long g = process_vm_readv(getppid(), &l, 1, &r, 1, 0);"
        " return g > 0 || errno == EFAULT; }",
    ),
    _sealed("its own memory as a file", 'open("/proc/self/mem", O_RDWR) >= 0'),
    _sealed("its map of memory", 'open("/proc/self/maps", O_RDONLY) >= 0'),
    _sealed("a file", 'open("planted", O_WRONLY | O_CREAT, 0600) >= 0'),
    _sealed("a file for all", 'open("/dev/shm/planted", O_WRONLY | O_CREAT, 0600) >= 0'),
    _sealed(
        "a file by the 32-bit door",
        "start() >= 0",
        'static char path[] __attribute__((aligned(16))) = "/tmp/planted";'
        "static int start(void) { char *low = mmap(0, 4096, 3, MAP_32BIT | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);"
        ' if (low == MAP_FAILED) return -1; memcpy(low, path, sizeof path); int p; asm volatile("int $0x80" : "=a"(p) :'
        ' "a"(5), "b"(low), "c"(O_WRONLY | O_CREAT), "d"(0600) : "memory", "r8", "r9", "r10", "r11"); return p; }',
    ),
    _sealed("a file by io_uring", "syscall(425, 4, ring) >= 0", "static char ring[256];"),
    _sealed("a file is deleted", '!unlink("/dev/shm/victim")'),
    _sealed("memory that stays", "shmget(IPC_PRIVATE, 4096, IPC_CREAT | 0600) >= 0"),
    _sealed("a socket", "socket(AF_INET, SOCK_STREAM, 0) >= 0"),
    _sealed("a local socket", "socket(AF_UNIX, SOCK_STREAM, 0) >= 0"),
    _sealed("a namespace", "!unshare(CLONE_NEWUSER)"),
    _sealed("a time namespace", "!unshare(0x80)"),
    _sealed("a mount", '!syscall(SYS_mount, "none", "/mnt", "tmpfs", 0, 0)'),
    _sealed("faults handled by it", "syscall(SYS_userfaultfd, 1) >= 0"),
    _sealed(
        "counters of the processor",
        "syscall(SYS_perf_event_open, b, 0, -1, -1, 0) >= 0",
        "static long b[16] = {0, 112L << 32};",
    ),
    _sealed("a program of the kernel's", "syscall(SYS_bpf, 0, b, 72) >= 0", "static int b[32] = {2, 4, 4, 1};"),
    _sealed("a key that stays", 'syscall(SYS_add_key, "user", "planted", "1", 1, -4) >= 0'),
    _sealed(
        "a constructor starts a child",
        "done",
        "static int go(void) { pid_t p = fork(); if (!p) _exit(0); return p > 0; }" + _EARLY.format(attack="go()"),
    ),
    _sealed(
        "a constructor writes a file", "done", _EARLY.format(attack='open("planted", O_WRONLY | O_CREAT, 0600) >= 0')
    ),
    _sealed("a constructor reads a file", "done", _EARLY.format(attack='open("/etc/passwd", O_RDONLY) >= 0')),
    _sealed("a constructor signals", "done", _EARLY.format(attack="!kill(getppid(), 0)")),
]

_FINE = "void kernel(const float *x, float *out, int n, int m) { for (long i = 0; i < (long)n * m; i++) out[i] = 0; }\n"
COMPILER = [
    ("the compiler's surroundings", '#include "/proc/self/environ"\n' + _FINE),
    ("the assembler's surroundings", 'asm(".include \\"/proc/self/environ\\"");\n' + _FINE),
    ("the terminal", '#include "/dev/stdin"\n#include "/dev/tty"\n#error\n' + _FINE),
    ("itself without end", "#include __FILE__\n" + _FINE),
    ("zeros without end", '#include "/dev/zero"\n' + _FINE),
    (
        "macros without end",
        "".join(f"#define A{i + 1} A{i} A{i} A{i} A{i}\n" for i in range(20)) + "#define A0 1+\nint a = A20 1;\n",
    ),
    ("a file without end", 'asm(".data; .fill 12000000000,1,1; .text");\n' + _FINE),
    ("assembly without end", 'asm(".rept 2000000000; nop; .endr");\n' + _FINE),
    ("a constant without end", "char a[1L << 34] = {1};\n" + _FINE),
    ("an impossible line", '#line 2147483647 "/etc/passwd"\n#error no\n' + _FINE),
    ("a line before the first", '#line 0 "kernel.c"\n#error no\n' + _FINE),
    ("a long complaint", "#error " + "very " * 200000 + "\n" + _FINE),
    ("many complaints", "".join(f"int a{i} = b{i};\n" for i in range(2000)) + _FINE),
    ("deep brackets", "int a = " + "(" * 100000 + "1" + ")" * 100000 + ";\n" + _FINE),
    ("half a character", _FINE + "/* \ud800 */"),
    ("a zero byte", "\0" + _FINE + "\0 \0"),
    ("bytes that are no text", _FINE + '#error "\udcff\udcfe"\n'),
    ("its own main", "int main(void) { return 0; }\n" + _FINE),
    ("its own start", "void _start(void) {}\nvoid _init(void) {}\n" + _FINE),
    ("a variable for a function", "int kernel = 5;"),
    (
        "a missing function",
        '__attribute__((weak)) void other();\nextern void kernel() __attribute__((weakref("other")));',
    ),
    (
        "own memory functions",
        "#include <stddef.h>\nvoid *memcpy(void *a, const void *b, size_t n) { (void)b; (void)n; return a; }\n"
        "int memcmp(const void *a, const void *b, size_t n) { (void)a; (void)b; (void)n; return 0; }\n"
        "void *malloc(size_t n) { (void)n; return 0; }\n"
        "int write(int f, const void *b, size_t n) { (void)f; (void)b; return n; }\n" + _FINE,
    ),
]


@pytest.fixture(scope="module")
def timed():
    with Evaluator(workers=1, cache=False) as evaluator:
        yield evaluator


@pytest.fixture(scope="module")
def checked():
    with Evaluator(workers=1, cache=False, timing=False) as evaluator:
        yield evaluator


def honest(work: str) -> str:
    """A candidate that does what is asked and nothing else."""
    loop = f"for (long i = 0; i < (long)n * m; i++) out[i] = {work};"
    return f"#include <math.h>\nvoid kernel(const float *x, float *out, int n, int m) {{ {loop} }}\n"


@pytest.fixture(scope="module")
def speed(timed):
    """What honest work earns, by its expression."""
    tasks = ((COMPOSED, _WORK), (QUICK, _QUICK_WORK))
    found = {work: timed.evaluate(of, honest(work)).speedup for of, work in tasks}
    assert all(found.values())
    return found


def is_unharmed(evaluator: Evaluator, honest_speed: float | None = None) -> bool:
    """Whether an honest candidate still gets what it always gets."""
    found = evaluator.evaluate(COMPOSED, honest(_WORK))
    same = honest_speed is None or honest_speed / _NOISE < (found.speedup or 0) < honest_speed * _NOISE
    return found.trusted and not found.message and same


def named(attacks):
    return pytest.mark.parametrize("attack", attacks, ids=[attack.name for attack in attacks])


@named(CHEATS)
def test_no_time_is_better_than_the_work(timed, speed, attack):
    found = timed.evaluate(COMPOSED, attack.source())
    assert not found.trusted or found.speedup < _NOISE * speed[_WORK]


def test_cheats_leave_the_times_of_others_alone(timed, speed):
    assert is_unharmed(timed, speed[_WORK])


@named(CLOCKS)
def test_no_clock_makes_a_quick_kernel_quicker(timed, speed, attack):
    found = timed.evaluate(QUICK, attack.source(_QUICK_WORK))
    assert not found.trusted or found.speedup < _NOISE * speed[_QUICK_WORK]


@named(ATTACKS)
def test_attacks_on_the_process(checked, attack):
    found = checked.evaluate(COMPOSED, attack.source())
    assert found.status in (attack.statuses or set(Status) - {Status.CORRECT})
    assert is_unharmed(checked)


def test_an_end_in_the_timed_shape_only(timed, speed):
    attack = Attack("exit", "work(x, out, size); if (size > 5000) syscall(SYS_exit_group, 0);")
    found = timed.evaluate(COMPOSED, attack.source())
    assert found.status is Status.CRASH and not found.kernel_ms
    assert is_unharmed(timed, speed[_WORK])


@named(SEALED)
def test_attacks_on_the_machine(checked, attack):
    assert checked.evaluate(COMPOSED, attack.source()).status in attack.statuses


def test_sealed_attacks_leave_the_times_of_others_alone(timed, speed):
    assert is_unharmed(timed, speed[_WORK])


@pytest.mark.parametrize("source", [source for _, source in COMPILER], ids=[name for name, _ in COMPILER])
def test_attacks_on_the_compiler(checked, monkeypatch, source):
    monkeypatch.setattr(c, "_COMPILE_SECONDS", 1)
    monkeypatch.setenv("KERNELWRIGHT_SECRET", "a-value-to-be-kept")
    found = checked.evaluate(COMPOSED, source)
    assert found.status in (Status.COMPILE_ERROR, Status.WRONG)
    assert "a-value-to-be-kept" not in repr(found) and len(repr(found)) < 2000


def test_attacks_on_the_compiler_leave_others_alone(checked):
    assert is_unharmed(checked)


# ---------------------------------------------------------------- limits


def test_limit_the_compiler_reads_what_its_user_may_read(checked):
    # The compiler is trusted, runs without the evaluator's environment, and may live anywhere, so its reading is not
    # confined. A complaint about an included file can quote a few of its words; use a container where that matters.
    found = checked.evaluate(COMPOSED, '#include "/etc/passwd"\n' + _FINE)
    assert found.status is Status.COMPILE_ERROR and "root" not in found.message


def test_limit_a_library_may_refuse_to_end(checked):
    # the verdict is there before the library is unloaded, and the worker is killed rather than ended
    attack = next(attack for attack in ATTACKS if "library" in attack.name)
    assert checked.evaluate(COMPOSED, attack.source()).seconds < 5
