// Command stubengine stands for the programs of vLLM and SGLang in tests: an application names it in
// engine.command. It writes down what it was started with, and serves as the simulated engine does, or
// misbehaves:
//
//	STUB_DIR   folder where each process leaves <pid>.json with its command line and environment
//	STUB_DO    one of: exit=CODE (after some lines) · wrong-port=PORT · garbage (answers no HTTP) ·
//	           not-found (answers 418) · hang (never listens)
//	STUB_RANK  the data-parallel rank or node that STUB_DO is for; unset: all
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/dpserve/dpserve/internal/engine/sim"
)

// Start is what a process of the stub was started with.
type Start struct {
	Argv []string `json:"argv"`
	Env  []string `json:"env"`
	PID  int      `json:"pid"`
}

// fewLines are written before an exit.
const fewLines = 30

func main() {
	if err := record(os.Getenv("STUB_DIR")); err != nil {
		fmt.Fprintln(os.Stderr, "stubengine:", err)
		os.Exit(1)
	}
	os.Exit(run(os.Args[1:]))
}

// record leaves what this process was started with.
func record(dir string) error {
	if dir == "" {
		return nil
	}
	b, err := json.Marshal(Start{Argv: os.Args, Env: os.Environ(), PID: os.Getpid()})
	if err != nil {
		return err
	}
	path := filepath.Join(dir, strconv.Itoa(os.Getpid())+".json")
	if err := os.WriteFile(path+".new", b, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

func run(args []string) int {
	f := parse(args)
	if rank := os.Getenv("STUB_RANK"); rank == "" || rank == f.rank() {
		if code, ok := misbehave(f, os.Getenv("STUB_DO")); ok {
			return code
		}
	}
	if f.isSGLang() && f.rank() != "0" {
		return answer(f.address(), http.HandlerFunc(health))
	}
	return sim.Main(context.Background(), f.translate(), os.Stdout, os.Stderr)
}

// health is all that SGLang answers on nodes other than the first.
func health(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path != "/health" {
		http.NotFound(w, r)
	}
}

// misbehave does what STUB_DO says; ok is false if the engine shall go on as usual.
func misbehave(f flags, do string) (code int, ok bool) {
	what, value, _ := strings.Cut(do, "=")
	switch what {
	case "exit":
		for i := range fewLines {
			fmt.Fprintln(os.Stderr, "line", i)
		}
		fmt.Fprintln(os.Stderr, "torch.OutOfMemoryError: CUDA out of memory.")
		code, _ := strconv.Atoi(value)
		return code, true
	case "hang":
		await()
		return 0, true
	case "garbage":
		return babble(f.address()), true
	case "not-found":
		return answer(f.address(), http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusTeapot)
		})), true
	case "wrong-port":
		f.set("--port", value)
		f.drop("--kv-events-config")
	}
	return 0, false
}

// await waits for a signal to end.
func await() {
	terms := make(chan os.Signal, 1)
	signal.Notify(terms, syscall.SIGTERM, syscall.SIGINT)
	<-terms
}

// answer serves HTTP until it is told to end.
func answer(address string, h http.Handler) int {
	srv := &http.Server{Addr: address, Handler: h, ReadHeaderTimeout: time.Second}
	go func() {
		await()
		_ = srv.Close()
	}()
	if err := srv.ListenAndServe(); err != http.ErrServerClosed {
		fmt.Fprintln(os.Stderr, "stubengine:", err)
		return 1
	}
	return 0
}

// babble answers every connection with bytes that are no HTTP.
func babble(address string) int {
	l, err := net.Listen("tcp", address)
	if err != nil {
		fmt.Fprintln(os.Stderr, "stubengine:", err)
		return 1
	}
	go func() {
		await()
		_ = l.Close()
	}()
	for {
		c, err := l.Accept()
		if err != nil {
			return 0
		}
		_, _ = c.Write([]byte("220 mail.example.org ESMTP\r\n"))
		_ = c.Close()
	}
}

// flags is a command line of vLLM or SGLang, cut into a flag with its values each.
type flags struct{ words *[][]string }

// parse leaves out the words in front of the first flag: the command, and vLLM's model.
func parse(args []string) flags {
	var out [][]string
	for _, word := range args {
		switch {
		case strings.HasPrefix(word, "--"):
			out = append(out, []string{word})
		case len(out) > 0:
			out[len(out)-1] = append(out[len(out)-1], word)
		}
	}
	return flags{&out}
}

func (f flags) index(name string) int {
	return slices.IndexFunc(*f.words, func(words []string) bool { return words[0] == name })
}

// value is the first value of a flag, "" if it is not there.
func (f flags) value(name string) string {
	if i := f.index(name); i >= 0 && len((*f.words)[i]) > 1 {
		return (*f.words)[i][1]
	}
	return ""
}

func (f flags) set(name, value string) {
	f.drop(name)
	*f.words = append(*f.words, []string{name, value})
}

func (f flags) drop(name string) {
	*f.words = slices.DeleteFunc(*f.words, func(words []string) bool { return words[0] == name })
}

func (f flags) isSGLang() bool { return f.index("--model-path") >= 0 }

// rank is the process's number among those of its group.
func (f flags) rank() string {
	for _, name := range []string{"--data-parallel-rank", "--node-rank"} {
		if v := f.value(name); v != "" {
			return v
		}
	}
	return "0"
}

func (f flags) address() string { return net.JoinHostPort(f.value("--host"), f.value("--port")) }

// translate is the command line of the simulated engine. The ranks of SGLang's DP attention are those of the
// simulated engine behind one port.
func (f flags) translate() []string {
	if f.isSGLang() {
		if n := f.value("--dp-size"); n != "" && n != "1" {
			f.set("--sim-internal-lb", n)
		}
		if events := f.value("--kv-events-config"); events != "" {
			f.set("--kv-events-config", strings.Replace(events, "{", `{"enable_kv_cache_events":true,`, 1))
		}
		for theirs, ours := range map[string]string{
			"--max-running-requests": "--max-num-seqs", "--context-length": "--max-model-len",
			"--page-size": "--block-size",
		} {
			if v := f.value(theirs); v != "" {
				f.set(ours, v)
			}
		}
		if v := os.Getenv("SGLANG_TIMEOUT_KEEP_ALIVE"); v != "" {
			_ = os.Setenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", v)
		}
		for _, name := range []string{"--dp-size", "--model-path", "--dist-init-addr"} {
			f.drop(name)
		}
	}
	return slices.Concat(*f.words...)
}
