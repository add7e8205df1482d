//go:build linux

package main

import (
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/term"
)

// progressEvery is how often the line is drawn again.
const progressEvery = 200 * time.Millisecond

// progress is the line that says on a terminal how far the runs are. A nil one says nothing.
type progress struct {
	out   io.Writer
	width int // of the terminal
	total int // runs

	mu      sync.Mutex
	began   time.Time
	ended   int
	running []*runState // in the order in which they began
	quit    chan struct{}
	drawing sync.WaitGroup
}

// runState is one run that is under way.
type runState struct {
	name  string
	share float64 // of its requests that came, 0 to 1
}

// startProgress draws for total runs until stop. It is nil where out is no terminal.
func startProgress(out *os.File, total int) *progress {
	fd := int(out.Fd())
	if !term.IsTerminal(fd) {
		return nil
	}
	width, _, err := term.GetSize(fd)
	if err != nil {
		return nil
	}
	p := &progress{out: out, width: width, total: total, began: time.Now(), quit: make(chan struct{})}
	p.drawing.Go(func() {
		ticks := time.NewTicker(progressEvery)
		defer ticks.Stop()
		for {
			select {
			case <-p.quit:
				return
			case <-ticks.C:
				p.draw()
			}
		}
	})
	return p
}

// stop wipes the line.
func (p *progress) stop() {
	if p == nil {
		return
	}
	close(p.quit)
	p.drawing.Wait()
	p.wipe()
}

// wipe makes room for other output.
func (p *progress) wipe() {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	fmt.Fprint(p.out, "\r\x1b[K")
}

func (p *progress) begin(name string) *runState {
	r := &runState{name: name}
	if p == nil {
		return r
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.running = append(p.running, r)
	return r
}

func (p *progress) advance(r *runState, share float64) {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	r.share = share
}

func (p *progress) end(r *runState) {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ended++
	p.running = slices.DeleteFunc(p.running, func(x *runState) bool { return x == r })
}

func (p *progress) draw() {
	p.mu.Lock()
	defer p.mu.Unlock()
	fmt.Fprint(p.out, "\r", p.line(time.Now()), "\x1b[K")
}

// line is cut to the terminal's width. The caller holds the lock.
func (p *progress) line(now time.Time) string {
	done, words := float64(p.ended), make([]string, 0, len(p.running))
	for _, r := range p.running {
		done += r.share
		words = append(words, fmt.Sprintf("%s %.0f %%", r.name, 100*r.share))
	}
	left := ""
	if done > 0 {
		more := float64(now.Sub(p.began)) * (float64(p.total) - done) / done
		left = fmt.Sprintf(", %s left", time.Duration(more).Round(time.Second))
	}
	line := fmt.Sprintf("%d of %d runs%s: %s", p.ended, p.total, left, strings.Join(words, ", "))
	return line[:min(len(line), max(p.width-1, 0))]
}
