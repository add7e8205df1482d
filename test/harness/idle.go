package harness

import (
	"encoding/json"
	"fmt"
	"net/http"
	"time"

	"github.com/dpserve/dpserve/client"
)

// get is a GET at one node's admin API.
type get func(path string) (code int, text string, err error)

// idle says what a node still has: requests at ranks, as the leader reports them, and the queue and the
// reservations of the node's own ingress. more names applications to ask about while no leader lists them.
func idle(ask get, more ...string) error {
	code, text, err := ask("/api/v1/apps")
	if err != nil {
		return err
	}
	var list struct{ Apps []client.AppStatus }
	if code == http.StatusOK {
		if err := json.Unmarshal([]byte(text), &list); err != nil {
			return err
		}
		more = nil
	} else if code != http.StatusServiceUnavailable {
		return fmt.Errorf("apps: %d %s", code, text)
	}
	for _, a := range list.Apps {
		if a.Queued > 0 {
			return fmt.Errorf("%s: %d queued", a.Name, a.Queued)
		}
		for _, u := range a.Units {
			for _, k := range u.Ranks {
				if k.InFlight > 0 {
					return fmt.Errorf("%s rank %d/%d: %d in flight", a.Name, k.Group, k.Rank, k.InFlight)
				}
			}
		}
		more = append(more, a.Name)
	}
	for _, name := range more {
		if err := idleRouter(ask, name); err != nil {
			return err
		}
	}
	return nil
}

func idleRouter(ask get, app string) error {
	code, text, err := ask("/api/v1/routers/" + app)
	if err != nil {
		return err
	}
	if code != http.StatusOK {
		return nil // the node is no ingress, or has no rank of the app
	}
	var router client.Info
	if err := json.Unmarshal([]byte(text), &router); err != nil {
		return err
	}
	if router.Queued > 0 || router.Reservations > 0 {
		return fmt.Errorf("%s: %d queued, %d reserved", app, router.Queued, router.Reservations)
	}
	return nil
}

// endPatience bounds how long the requests of a test may take to end by themselves.
const endPatience = 60 * time.Second

// WaitFor calls f every step until it returns nil, and returns f's last error when limit is over. All waits
// of the tests of processes and nodes are made of it.
func WaitFor(limit, step time.Duration, f func() error) error {
	for end := time.Now().Add(limit); ; time.Sleep(step) {
		if err := f(); err == nil || time.Now().After(end) {
			return err
		}
	}
}

// soon waits until f returns nil, and returns f's last error.
func soon(f func() error) error { return WaitFor(endPatience, pollEvery, f) }
