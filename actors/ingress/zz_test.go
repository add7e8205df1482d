package ingress

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"
	"log/slog"

	"github.com/dpserve/dpserve/telemetry"
	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/app"
)

func TestZZ(t *testing.T) {
	role := os.Getenv("ZZ")
	if role == "" {
		t.Skip()
	}
	b := &testing.B{}
	switch role {
	case "engine":
		paced, _ := strconv.Atoi(os.Getenv("PACED"))
		l, _ := net.Listen("tcp", "127.0.0.1:0")
		fmt.Println("ADDR http://" + l.Addr().String())
		srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			drain(r)
			if paced == 0 {
				replies(200, wholeAnswer)(w, r)
				return
			}
			w.Header().Set("Content-Type", "text/event-stream")
			f := w.(http.Flusher)
			tick := time.NewTicker(10 * time.Millisecond)
			defer tick.Stop()
			for range paced {
				<-tick.C
				_, _ = w.Write([]byte(typicalChunk))
				f.Flush()
			}
			sse(w, stopChunk, doneEvent)
		})}
		_ = srv.Serve(l)
	case "proxy":
		fmt.Println("ADDR " + plainProxy(b, os.Getenv("ENGINE")))
		select {}
	case "ingress":
		s, f := newStore(), &feed{}
		r := &replica{feed: f, app: "demo", unit: "demo/0/0", url: os.Getenv("ENGINE"), max: 1024, owned: true, epoch: 1, incarnation: 7, accepting: true}
		r.stopped, r.open = make(chan struct{}), map[uint64]msg.Admit{}
		f.replicas = []*replica{r}
		a := demoApp()
		a.Routing = app.Routing{Policy: "power-of-two", Preset: "documented"}
		deploy(t, s, a, 1)
		in, err := New(Config{Node: "n1", Store: s, Feed: f, Metrics: telemetry.New(), Log: slog.New(slog.DiscardHandler), Seed: 1})
		if err != nil { t.Fatal(err) }
		addr, _ := in.Listen(context.Background(), "127.0.0.1:0")
		fmt.Println("ADDR http://" + addr.String())
		if os.Getenv("SECS") != "" { n, _ := strconv.Atoi(os.Getenv("SECS")); go func() { time.Sleep(time.Duration(n)*time.Second); _ = in.Close(context.Background()) }() }
		_ = in.Serve()
	case "load":
		n, _ := strconv.Atoi(os.Getenv("N"))
		c, _ := strconv.Atoi(os.Getenv("C"))
		body := chatBody
		if os.Getenv("STREAM") != "" { body = streamBody }
		if os.Getenv("BIG") != "" { body = `{"model":"demo","messages":[{"role":"user","content":"`+strings.Repeat("a prompt. ", 40<<10)+`"}]}` }
		load(b, os.Getenv("TARGET"), body, n, c)
	}
}
