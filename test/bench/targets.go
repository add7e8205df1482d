//go:build linux

package main

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// target is one way to the engines.
type target struct {
	name  string
	addrs []string // connections are spread over them
	pids  []int    // of the gateway; none for direct
	admin string   // of dpserve
	// where the client itself sends each request's prefill leg first; none = it has one leg
	prefill []string
}

// dial opens connection number i.
func (t *target) dial(ctx context.Context, i int, req []byte) (*client, error) {
	c, err := dial(ctx, t.addrs[i%len(t.addrs)], req)
	if err != nil || len(t.prefill) == 0 {
		return c, err
	}
	if c.before, err = dial(ctx, t.prefill[i%len(t.prefill)], prefillLeg(req)); err != nil {
		c.close()
		return nil, err
	}
	c.req = withMember(req, pullParams)
	return c, nil
}

// runReverseProxy is the baseline: net/http's ReverseProxy over all engines in turn. It reads the body whole
// first, as whoever may have to try a second engine must, and does nothing else.
func runReverseProxy(addr string, engines []string) error {
	next := 0
	lock := make(chan struct{}, 1)
	rp := &httputil.ReverseProxy{
		FlushInterval: -1,
		Transport:     &http.Transport{MaxIdleConnsPerHost: 1024, DisableCompression: true},
		Rewrite: func(r *httputil.ProxyRequest) {
			lock <- struct{}{}
			next = (next + 1) % len(engines)
			i := next
			<-lock
			r.SetURL(&url.URL{Scheme: "http", Host: engines[i]})
		},
	}
	srv := &http.Server{Addr: addr, Handler: wholeBody(rp), ReadHeaderTimeout: 10 * time.Second}
	return srv.ListenAndServe()
}

func wholeBody(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return // the client has left
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		next.ServeHTTP(w, r)
	})
}

func startEngines(ctx context.Context, self string, n int) ([]string, error) {
	var addrs []string
	for range n {
		a := freeAddr()
		if _, err := spawn(ctx, a, self, "-role", "engine", "-listen", a); err != nil {
			return nil, err
		}
		addrs = append(addrs, a)
	}
	return addrs, nil
}

func startReverseProxy(ctx context.Context, self string, engines []string) (target, error) {
	a := freeAddr()
	cmd, err := spawn(ctx, a, self, "-role", "proxy", "-listen", a, "-engines", strings.Join(engines, ","))
	if err != nil {
		return target{}, err
	}
	return target{name: "Go ReverseProxy", addrs: []string{a}, pids: []int{cmd.Process.Pid}}, nil
}

func startNginx(ctx context.Context, dir string, engines []string) (target, bool, error) {
	bin, err := exec.LookPath("nginx")
	if err != nil {
		return target{}, false, nil //nolint:nilerr // nginx is optional
	}
	a := freeAddr()
	var ups strings.Builder
	for _, e := range engines {
		fmt.Fprintf(&ups, "server %s; ", e)
	}
	conf := fmt.Sprintf(`daemon off; worker_processes %[4]d; pid %[1]s/nginx.pid; error_log %[1]s/error.log;
events { worker_connections 4096; }
http { access_log off; client_max_body_size 64m; client_body_buffer_size 1m;
 client_body_temp_path %[1]s/b; proxy_temp_path %[1]s/p;
 fastcgi_temp_path %[1]s/f; uwsgi_temp_path %[1]s/u; scgi_temp_path %[1]s/s; keepalive_requests 1000000;
 upstream e { least_conn; %[2]s keepalive 512; keepalive_requests 1000000; }
 server { listen %[3]s; location / {
  proxy_pass http://e; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off; } } }`,
		dir, ups.String(), a, nginxWorkers)
	file := filepath.Join(dir, "nginx.conf")
	if err := os.WriteFile(file, []byte(conf), 0o600); err != nil {
		return target{}, false, err
	}
	cmd, err := spawn(ctx, a, bin, "-c", file, "-p", dir)
	if err != nil {
		return target{}, false, err
	}
	workers, err := nginxProcesses(ctx, cmd.Process.Pid)
	return target{name: "nginx", addrs: []string{a}, pids: workers}, true, err
}

// nginxWorkers is what the configuration asks for; the mock engines and the client have the other cores.
const nginxWorkers = 2

// nginxProcesses waits for the workers, which begin after the port is bound, and returns their ids and the
// master's.
func nginxProcesses(ctx context.Context, master int) ([]int, error) {
	for range 500 {
		if pids := children(master); len(pids) >= nginxWorkers {
			return append(pids, master), nil
		}
		if err := pause(ctx, 10*time.Millisecond); err != nil {
			return nil, err
		}
	}
	return nil, fmt.Errorf("%w: nginx has no workers after 5 s", errUnexpected)
}

// node is a running dpserve.
type node struct {
	bin, dir    string
	http, admin string
	cmd         *exec.Cmd
}

func startNode(ctx context.Context, bin, dir string) (*node, error) {
	n := &node{bin: bin, dir: dir, http: freeAddr(), admin: freeAddr()}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, err
	}
	var err error
	n.cmd, err = spawn(ctx, n.admin, bin, "start", "--http-bind", n.http, "--admin-bind", n.admin,
		"--data-dir", filepath.Join(dir, "data"), "--log-level", "warn")
	return n, err
}

// deploy brings up the applications of a file and waits for them.
func (n *node) deploy(ctx context.Context, yaml string) error {
	file := filepath.Join(n.dir, "bench.yaml")
	if err := os.WriteFile(file, []byte(yaml), 0o600); err != nil {
		return err
	}
	deploy := exec.CommandContext(ctx, n.bin, "deploy", file, "--timeout", "30s")
	deploy.Env = append(os.Environ(), "DPSERVE_ADDR="+n.admin)
	if out, err := deploy.CombinedOutput(); err != nil {
		return fmt.Errorf("deploy: %w\n%s", err, out)
	}
	return nil
}

func startDpserve(ctx context.Context, bin, dir string, engines []string, r routed) (target, error) {
	var ranks strings.Builder
	for _, e := range engines {
		fmt.Fprintf(&ranks, "        - {url: \"http://%s\"}\n", e)
	}
	return startAttached(ctx, bin, dir, cmp.Or(r.name, filepath.Base(bin)), r.yaml(), ranks.String())
}

// startAttached starts a dpserve over engines that run. ranks are the lines of the list, keys further keys of
// the application.
func startAttached(ctx context.Context, bin, dir, name, keys, ranks string) (target, error) {
	n, err := startNode(ctx, bin, dir)
	if err != nil {
		return target{}, err
	}
	if err := n.deploy(ctx, fmt.Sprintf(`applications:
  - name: bench
    model: {id: bench}
    max_ongoing_requests: 1024
%s    engine:
      kind: attach
      family: vllm
      ranks:
%s`, keys, ranks)); err != nil {
		return target{}, err
	}
	return target{name: name, addrs: []string{n.http}, admin: n.admin, pids: []int{n.cmd.Process.Pid}}, nil
}
