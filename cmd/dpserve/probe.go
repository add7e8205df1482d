package main

import (
	"context"
	"errors"
	"net"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/engine/attach"
	"github.com/dpserve/dpserve/internal/pause"
	"github.com/dpserve/dpserve/internal/problem"
)

// Bounds of probing the engines of --attach.
const (
	probeTimeout = 10 * time.Second
	probesAtOnce = 8
	probeAgain   = time.Second // after an engine has not answered
)

// probeURL says what the engine at a URL is.
type probeURL func(ctx context.Context, url string) (attach.Found, error)

// probeWith returns probeOne for engines with a key and a CA.
func probeWith(with app.Engine) probeURL {
	return func(ctx context.Context, url string) (attach.Found, error) { return probeOne(ctx, url, with) }
}

// awaitURLs probes engines, and asks those again that do not answer yet, for at most wait; 0 = each once.
func awaitURLs(ctx context.Context, wait time.Duration, urls []string, probe probeURL,
	say func(format string, args ...any),
) ([]attach.Found, error) {
	if wait <= 0 {
		return probeURLs(ctx, urls, probe)
	}
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	return probeURLs(ctx, urls, func(ctx context.Context, url string) (attach.Found, error) {
		var why error // the last answer before the time was over
		for {
			found, err := probe(ctx, url)
			if err == nil || !attach.IsLate(err) {
				return found, err
			}
			if why == nil {
				say("waiting for %s, for up to %s: %s", url, wait, joinLines(err.Error()))
			}
			if why == nil || ctx.Err() == nil {
				why = err
			}
			ended := pause.For(ctx, probeAgain)
			if errors.Is(ended, context.DeadlineExceeded) {
				return found, problem.New(problem.Timeout, "not there within %s: %w", wait, why).
					WithHint("start the engine, or wait longer with --attach-wait")
			}
			if ended != nil {
				return found, ended
			}
		}
	})
}

// probeURLs probes engines, several at a time.
func probeURLs(ctx context.Context, urls []string, probe probeURL) ([]attach.Found, error) {
	found := make([]attach.Found, len(urls))
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(probesAtOnce)
	for i, u := range urls {
		g.Go(func() (err error) {
			found[i], err = probe(ctx, u)
			return err
		})
	}
	return found, g.Wait()
}

// probeOne asks the engine at a URL, or the first engine of a service that answers.
func probeOne(ctx context.Context, url string, with app.Engine) (attach.Found, error) {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	access, err := engine.AccessTo(&app.Application{Engine: with})
	if err != nil {
		return attach.Found{}, err
	}
	if !app.IsServiceURL(url) {
		return attach.Probe(ctx, url, access)
	}
	service := app.AttachService{URL: url}
	access.Expect(service.Host())
	addresses, err := net.DefaultResolver.LookupNetIP(ctx, "ip", service.Host())
	if err != nil {
		return attach.Found{}, problem.New(problem.Unavailable, "%s has no address: %w", url, err).
			WithHint("check the name, and whether the service has engines")
	}
	var found attach.Found
	for _, r := range service.Ranks(addresses) {
		if found, err = attach.Probe(ctx, r.URL, access); err == nil {
			found.URL, found.Ranks = url, nil // each address is a rank
			return found, nil
		}
	}
	return found, err
}
