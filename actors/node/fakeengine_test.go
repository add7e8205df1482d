package node_test

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/dpserve/dpserve/internal/engine"
)

// The test binary is also the engine: TestMain hands over to fakeEngine when its first argument says so.
const (
	engineWord = "fake-engine"
	simWord    = "sim-engine" // the simulated engine
	childWord  = "fake-child"
	nodeWord   = "fake-node"
)

// fakeEngine serves the routes that a node uses, and misbehaves as its flags say.
func fakeEngine(args []string) int {
	fs := flag.NewFlagSet(engineWord, flag.ContinueOnError)
	port := fs.Int("port", 0, "")
	rank := fs.Int("data-parallel-rank", 0, "")
	mode := fs.String("mode", "", "comma separated")
	file := fs.String("file", "", "")
	host := fs.String("host", engine.Loopback, "")
	nodeRank := fs.Int("node-rank", 0, "")
	var ignored string
	for _, name := range []string{
		"served-model-name", "shutdown-timeout", "data-parallel-size",
		"data-parallel-size-local", "data-parallel-address", "data-parallel-rpc-port",
		"model-path", "dist-init-addr", "dp-size", "load-balance-method", "nnodes",
	} {
		fs.StringVar(&ignored, name, "", "")
	}
	for _, name := range []string{"enable-metrics", "enable-cache-report", "enable-dp-attention"} {
		fs.Bool(name, false, "")
	}
	events := fs.String("kv-events-config", "", "")
	fs.Bool("enable-prompt-tokens-details", false, "")
	fs.Bool("sim-watch-stdin", false, "")
	if err := fs.Parse(args); err != nil {
		return 2
	}
	has := func(m string) bool { return strings.Contains(","+*mode+",", ","+m+",") }
	fmt.Println("engine rank", *rank, "on port", *port)
	switch {
	case has("exit0") || has("exit7") || has("once") && once(*file) || has("rank1dies") && *rank == 1:
		for i := range 30 {
			fmt.Fprintln(os.Stderr, "line", i)
		}
		fmt.Fprint(os.Stderr, "no room for the model")
		if has("exit7") {
			return 7
		}
		return 0
	case has("moved"):
		*port, _ = strconv.Atoi(*file)
	case has("hang"):
		time.Sleep(time.Hour)
	}
	routes := fakeRoutes(*rank, *events, has)
	if *nodeRank > 0 { // SGLang's other nodes answer for their health only
		routes = http.NewServeMux()
		routes.HandleFunc("/health", func(http.ResponseWriter, *http.Request) {})
	}
	return serveFake(net.JoinHostPort(*host, strconv.Itoa(*port)), routes, has)
}

// once returns true the first time it is asked about a file.
func once(file string) bool {
	f, err := os.OpenFile(file, os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return false
	}
	_ = f.Close()
	return true
}

func serveFake(address string, routes http.Handler, has func(string) bool) int {
	ln, err := net.Listen("tcp", address)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	if has("orphan") || has("escaped") {
		if err := leaveChild(ln, has("escaped")); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	}
	terms := make(chan os.Signal, 1)
	signal.Notify(terms, syscall.SIGTERM)
	srv := &http.Server{Handler: routes, ReadHeaderTimeout: time.Second}
	go func() { _ = srv.Serve(ln) }()
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}()
	for range terms {
		fmt.Println("SIGTERM")
		if !has("stubborn") {
			return 0
		}
	}
	return 0
}

func fakeRoutes(rank int, events string, has func(string) bool) *http.ServeMux {
	mux := http.NewServeMux()
	mux.HandleFunc("/kv_event_sources", func(w http.ResponseWriter, _ *http.Request) {
		switch {
		case has("garbage"):
			fmt.Fprint(w, "<html>")
		case has("broken"):
			http.Error(w, "oops", 500)
		case has("silent"):
			fmt.Fprint(w, "{}")
		case has("elsewhere"):
			fmt.Fprintf(w,
				`{"%d":{"enable_kv_cache_events":true,"publisher":"zmq",`+
					`"endpoint":"tcp://*:5557","replay_endpoint":null}}`, rank)
		case has("nooffset"): // its own source, without its number
			fmt.Fprintf(w, `{"%d":%s}`, rank, events)
		default:
			http.Error(w, `{"detail":"Not Found"}`, http.StatusNotFound)
		}
	})
	mux.HandleFunc("/health", func(w http.ResponseWriter, _ *http.Request) {
		if has("teapot") {
			w.WriteHeader(http.StatusTeapot)
		}
	})
	mux.HandleFunc("/v1/models", func(w http.ResponseWriter, _ *http.Request) {
		length := 2048
		if has("mismatch") {
			length += rank
		}
		fmt.Fprintf(w, `{"data":[{"id":"demo","owned_by":"vllm","max_model_len":%d}]}`, length)
	})
	mux.HandleFunc("/v1/completions", func(w http.ResponseWriter, r *http.Request) {
		named := r.Header.Get("X-Data-Parallel-Rank")
		if _, err := strconv.Atoi(named); has("attention") && err != nil {
			http.Error(w, "which rank?", http.StatusBadRequest)
			return
		}
		if has("attention") {
			fmt.Println("a token of rank", named)
		}
		if has("noprobe") {
			http.Error(w, `{"error":{"message":"EngineCore died","type":"InternalServerError"}}`, 500)
			return
		}
		fmt.Fprint(w, `{"choices":[{"finish_reason":"length"}]}`)
	})
	mux.HandleFunc("/exit", func(_ http.ResponseWriter, r *http.Request) {
		code, _ := strconv.Atoi(r.URL.Query().Get("code"))
		os.Exit(code)
	})
	return mux
}

// leaveChild starts a child that holds the listening socket and ignores signals, as an engine's workers do.
func leaveChild(ln net.Listener, setsid bool) error {
	tcp, ok := ln.(*net.TCPListener)
	if !ok {
		return errors.New("no TCP listener")
	}
	f, err := tcp.File()
	if err != nil {
		return err
	}
	cmd := exec.Command(os.Args[0], childWord)
	cmd.ExtraFiles = []*os.File{f}
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: setsid}
	ready, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	_ = ready
	return cmd.Start()
}

func fakeChild() int {
	signal.Ignore(syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
	time.Sleep(time.Hour)
	return 0
}
