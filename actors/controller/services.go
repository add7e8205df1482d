package controller

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/dpserve/dpserve/internal/app"
)

// Times and bounds of the services of applications of kind attach.
const (
	serviceLook     = 5 * time.Second  // between two lookups of a service,
	serviceJitter   = time.Second      // and at most this much more
	serviceTimeout  = 3 * time.Second  // of a lookup
	serviceGone     = 10 * time.Second // a rank whose address DNS has not named for this time leaves
	serviceGrace    = 30 * time.Second // after this time without any address, ranks that are not ready leave
	maxServiceRanks = 256              // of a service
	lookupsAtOnce   = 8
)

// lookup is the result of resolving a service.
type lookup struct {
	at    time.Time
	ranks []app.AttachRank // one per address
	err   error
}

// hasNothing reports that DNS has answered, and knows no address. Any other error says nothing about the
// engines.
func (l *lookup) hasNothing() bool {
	dns, ok := errors.AsType[*net.DNSError](l.err)
	return l.err == nil && len(l.ranks) == 0 || ok && dns.IsNotFound
}

// cause returns the error in words that are the same at the next lookup.
func (l *lookup) cause() string {
	dns, ok := errors.AsType[*net.DNSError](l.err)
	switch {
	case errors.Is(l.err, context.DeadlineExceeded), ok && dns.IsTimeout:
		return "the name server does not answer"
	case ok:
		parts := strings.Split(dns.Err, ": ") // those before the last one may have a port that changes
		return parts[len(parts)-1]
	default:
		return l.err.Error()
	}
}

// serviceView is what the lookups of one service have shown so far. The zero value has seen none.
type serviceView struct {
	missing map[string]time.Time // URLs of ranks that the answers lack: since when
	empty   time.Time            // since when DNS knows no address; zero: it does, or has not answered
	note    string               // what people should know, "" = nothing
}

// next takes a lookup and says which ranks of the service are to be added, and the URLs of those to be
// removed. attached has the URLs of its ranks, and whether each is ready.
func (v *serviceView) next(l *lookup, attached map[string]bool) (add []app.AttachRank, remove []string) {
	v.note = ""
	switch {
	case l.hasNothing():
		v.missing = nil
		if v.note = "its name has no address"; v.empty.IsZero() {
			v.empty = l.at
		}
		for url, isReady := range attached {
			if !isReady && l.at.Sub(v.empty) >= serviceGrace {
				remove = append(remove, url)
			}
		}
	case l.err != nil:
		v.missing, v.empty = nil, time.Time{}
		v.note = "its name cannot be resolved, and its ranks stay: " + l.cause()
	default:
		v.empty = time.Time{}
		remove = v.findGone(l, attached)
		var left int
		add, left = findNew(l, attached, maxServiceRanks-len(attached)+len(remove))
		if left > 0 {
			v.note = fmt.Sprintf("its name has %d addresses, of which at most %d are attached", len(l.ranks),
				maxServiceRanks)
		}
	}
	slices.Sort(remove)
	return add, remove
}

// findGone returns the ranks that the answers have lacked for long enough.
func (v *serviceView) findGone(l *lookup, attached map[string]bool) (gone []string) {
	missing := map[string]time.Time{}
	for url := range attached {
		if slices.ContainsFunc(l.ranks, func(r app.AttachRank) bool { return r.URL == url }) {
			continue
		}
		since, known := v.missing[url]
		if !known {
			since = l.at
		}
		if missing[url] = since; l.at.Sub(since) >= serviceGone {
			gone = append(gone, url)
		}
	}
	v.missing = missing
	return gone
}

// findNew returns the ranks that are not attached, as many as there is room for, and how many are left.
func findNew(l *lookup, attached map[string]bool, room int) (add []app.AttachRank, left int) {
	for _, r := range l.ranks {
		if _, has := attached[r.URL]; !has {
			add = append(add, r)
		}
	}
	n := min(len(add), max(0, room))
	return add[:n], len(add) - n
}
