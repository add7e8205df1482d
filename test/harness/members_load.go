package harness

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"
)

// Load runs clients that send requests to an application through one or more endpoints until End.
type Load struct {
	t      testing.TB
	stop   context.CancelFunc
	ctx    context.Context //nolint:containedctx // the clients' life
	wg     sync.WaitGroup
	mu     sync.Mutex
	all    []Answer
	hung   time.Duration
	client *http.Client
}

// Answer is the result of one request, as its client saw it.
type Answer struct {
	*Stream
	At     string    // the endpoint
	Client string    // who asked, one request after the other
	Began  time.Time // when it was sent
	Hung   bool      // it was given up
}

func (a *Answer) String() string {
	return fmt.Sprintf("at %s, began %s, took %s, hung %v: %v", a.At, a.Began.Format("05.000"),
		a.Total.Round(time.Millisecond), a.Hung, a.Stream)
}

// Tally counts answers.
type Tally struct {
	OK      int
	Refused int // errors before the first byte
	Broken  int // well-formed error events after it; the connection ends there
	Cut     int // ends after it without a word
	Hung    int
	Ranks   map[string]int // GROUP/RANK of OK
	Bad     []string       // the first ones that were not OK
}

func (y Tally) String() string {
	return fmt.Sprintf("ok %d, errors before the first byte %d, error events after it %d, cut after it %d, "+
		"hung %d, by rank %v\n%s",
		y.OK, y.Refused, y.Broken, y.Cut, y.Hung, y.Ranks, strings.Join(y.Bad, "\n"))
}

// HungAfter is the time after which a client of Load gives up a request.
const HungAfter = 30 * time.Second

// betweenRequests is the pause of a client of Load between two requests. Without it the clients of one test
// would take both processors of a small machine from the tests beside it.
const betweenRequests = 20 * time.Millisecond

// StartLoad runs clients at each endpoint (host:port). Every second client streams tokens tokens, the others
// ask for a short whole answer.
func StartLoad(t testing.TB, app string, clients, tokens int, endpoints ...string) *Load {
	t.Helper()
	return startLoad(t, app, clients, tokens, HungAfter, func(i int) bool { return i%2 == 0 }, endpoints)
}

// StartStreams is StartLoad with clients that all stream, and give a stream up after patience.
func StartStreams(t testing.TB, app string, clients, tokens int, patience time.Duration,
	endpoints ...string,
) *Load {
	t.Helper()
	return startLoad(t, app, clients, tokens, patience, func(int) bool { return true }, endpoints)
}

// startLoad runs clients at each endpoint, of which client i streams if streams says so.
func startLoad(t testing.TB, app string, clients, tokens int, patience time.Duration,
	streams func(i int) bool, endpoints []string,
) *Load {
	l := &Load{t: t, hung: patience}
	l.client = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: clients}}
	l.ctx, l.stop = context.WithCancel(context.Background())
	for _, at := range endpoints {
		for i := range clients {
			l.wg.Go(func() { l.run(app, at, fmt.Sprintf("%d at %s", i, at), tokens, streams(i)) })
		}
	}
	t.Cleanup(func() { l.End() })
	return l
}

func (l *Load) run(app, at, who string, tokens int, stream bool) {
	if !stream {
		tokens = 1
	}
	body := Chat(app, "hello", tokens, stream)
	for l.ctx.Err() == nil {
		a := l.one(at, body, stream)
		a.Client = who
		l.mu.Lock()
		l.all = append(l.all, a)
		l.mu.Unlock()
		time.Sleep(betweenRequests)
	}
}

func (l *Load) one(at, body string, stream bool) Answer {
	ctx, cancel := context.WithTimeout(context.Background(), l.hung)
	defer cancel()
	a := Answer{At: at, Began: time.Now()}
	a.Stream = l.ask(ctx, at, body, stream, a.Began)
	a.Total = time.Since(a.Began)
	a.Hung = ctx.Err() != nil
	return a
}

func (l *Load) ask(ctx context.Context, at, body string, stream bool, began time.Time) *Stream {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+at+"/v1/chat/completions",
		strings.NewReader(body))
	if err != nil {
		return &Stream{Err: err}
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := l.client.Do(req)
	if err != nil {
		return &Stream{Err: err}
	}
	defer resp.Body.Close()
	if !stream && resp.StatusCode == http.StatusOK {
		return readWhole(resp, began)
	}
	return readStream(resp, began)
}

// Since counts the answers to requests that were sent at or after a moment and have ended by now.
func (l *Load) Since(at time.Time) Tally {
	y := Tally{Ranks: map[string]int{}}
	for _, a := range l.Answers(at) {
		y.add(&a)
	}
	return y
}

// Answers are those to requests that were sent at or after a moment and have ended by now.
func (l *Load) Answers(at time.Time) (out []Answer) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, a := range l.all {
		if !a.Began.Before(at) {
			out = append(out, a)
		}
	}
	return out
}

// maxBad bounds what a test prints.
const maxBad = 20

func (y *Tally) add(a *Answer) {
	switch {
	case a.OK():
		y.OK++
		y.Ranks[a.Rank]++
		return
	case a.Hung:
		y.Hung++
	case !a.FirstByte():
		y.Refused++
	case a.Error != "":
		y.Broken++
	default:
		y.Cut++
	}
	if len(y.Bad) < maxBad {
		y.Bad = append(y.Bad, a.String())
	}
}

// Reaches waits until n more requests, sent from now on, were answered without an error.
func (l *Load) Reaches(n int) {
	l.t.Helper()
	from := time.Now()
	deadline := from.Add(Patience)
	for {
		y := l.Since(from)
		if y.OK >= n {
			return
		}
		if time.Now().After(deadline) {
			l.t.Fatalf("%d answers in %s, want %d: %v", y.OK, Patience, n, y)
		}
		time.Sleep(pollEvery)
	}
}

// End lets the requests under way end and returns the count of all. Idempotent.
func (l *Load) End() Tally {
	l.stop()
	l.wg.Wait()
	l.client.CloseIdleConnections()
	return l.Since(time.Time{})
}
