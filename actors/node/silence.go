package node

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/process"
)

// silence finds out, while a started engine is not healthy yet, that it will never be: something else answers
// on its port, or the engine answers on another port.
type silence struct {
	wrong  time.Time // since when the answers are none of an engine; zero: they are not
	looked time.Time // when its other ports were last asked
}

// The reasons why an engine will never be healthy.
var (
	errNoEngine  = errors.New("what answers on the engine's port is no engine")
	errElsewhere = errors.New("the engine listens on another port than its command line says")
)

// The ports that kernels choose. What an engine opens there is none of its API.
const (
	firstChosen = 32768
	lastChosen  = 60999
)

// judge returns an error if one of the two is certain. The probe's deadline is the time for which answers
// must be wrong, and the pause between two looks at other ports.
func (s *silence) judge(ctx context.Context, r *rank, h engine.Health, cause error) error {
	limit, now := r.unit.n.timers.Probe, time.Now()
	isWrong := h == engine.Odd || cause != nil && strings.Contains(cause.Error(), "malformed HTTP")
	switch {
	case r.unit.attached():
		return nil
	case !isWrong:
		s.wrong = time.Time{}
	case s.wrong.IsZero():
		s.wrong = now
	case now.Sub(s.wrong) >= limit:
		return fmt.Errorf("%w: %w", errNoEngine, cause)
	}
	if s.looked.IsZero() {
		s.looked = now
	}
	if h != engine.RefusedConn || now.Sub(s.looked) < limit {
		return nil
	}
	s.looked = now
	return findElsewhere(ctx, r)
}

// findElsewhere asks the other ports on which the engine's processes listen for its models.
func findElsewhere(ctx context.Context, r *rank) error {
	p, block := r.process(), r.unit.m.Block
	if p == nil || p.PID() <= 0 {
		return nil
	}
	for _, port := range process.ListeningPorts(p.PID()) {
		isOwn := port >= block.Base && port < block.Base+block.Size
		if isOwn || port >= firstChosen && port <= lastChosen {
			continue
		}
		ctx, cancel := context.WithTimeout(ctx, r.healthTimeout())
		url := "http://" + net.JoinHostPort(engine.Loopback, strconv.Itoa(port))
		_, err := engine.NewClient(url, engine.Addressing{}, r.target.Access,
			r.unit.n.cfg.Transport).Models(ctx)
		cancel()
		if err == nil {
			return fmt.Errorf("%w: it answers on port %d, not on %s; engine.command must pass its "+
				"arguments on", errElsewhere, port, r.target.URL)
		}
	}
	return nil
}
