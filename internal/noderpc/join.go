package noderpc

import (
	"errors"
	"net"
	"slices"
	"strconv"
	"strings"

	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// OldestVersion is the oldest release that can exchange messages with this one.
const OldestVersion = "v0.1.0"

// The steps of a join; an error begins with the one that failed.
const (
	stepToken       = "token"
	stepCertificate = "certificate"
	stepMember      = "member"
)

// Bounds of a node's record, as a stranger or a peer may hand it in.
const (
	maxRoles   = 8 // there are three
	maxNodeID  = 128
	maxSlots   = 4096
	maxDevices = 1024
	maxLabels  = 64
)

// stepError puts the step in front of an error, in place of the command that the state refused.
func stepError(step string, err error) *problem.Error {
	why := err.Error()
	for _, command := range []string{"use token: ", "put node: "} {
		why = strings.TrimPrefix(why, command)
	}
	e := problem.New(problem.CodeOf(err), "%w", &wireError{text: step + ": " + why, is: []error{err}})
	var inner *problem.Error
	if errors.As(err, &inner) {
		e.Hint, e.Doc, e.Details = inner.Hint, inner.Doc, inner.Details
	}
	return e
}

// checkVersion refuses a node of a release that is too old to understand this one. A version that is no
// release (a build of a checkout) counts as new.
func checkVersion(theirs, ours string) error {
	release, ok := parseRelease(theirs)
	oldest, _ := parseRelease(OldestVersion)
	if !ok || slices.Compare(release[:], oldest[:]) >= 0 {
		return nil
	}
	return problem.New(problem.Conflict,
		"the node runs dpserve %s, this cluster %s, which works with %s and later", theirs, ours,
		OldestVersion).
		WithHint("install dpserve %s on the node", ours)
}

// parseRelease reads v1.2.3 and ignores a suffix after - or +; v0.0.0 is no release.
func parseRelease(v string) (r [3]int, ok bool) {
	v, _, _ = strings.Cut(strings.TrimPrefix(v, "v"), "+")
	v, _, _ = strings.Cut(v, "-")
	parts := strings.Split(v, ".")
	if len(parts) != len(r) {
		return r, false
	}
	for i, p := range parts {
		n, err := strconv.ParseUint(p, 10, 16)
		if err != nil {
			return r, false
		}
		r[i] = int(n)
	}
	return r, r != [3]int{}
}

// checkNode refuses a record that no node of a cluster can have.
func checkNode(n *state.Node) error {
	_, _, badAddress := net.SplitHostPort(n.Address)
	_, _, badGossip := net.SplitHostPort(n.Gossip)
	o := &n.Resources
	switch {
	case n.ID == "" || len(n.ID) > maxNodeID || strings.ContainsAny(n.ID, "/ \t\r\n") ||
		n.ID != cleanText(n.ID, maxNodeID):
		return badNode("its name %q must be 1 to %d bytes without spaces and slashes",
			cleanText(n.ID, maxNodeID), maxNodeID)
	case n.UID == "" || len(n.UID) > maxNodeID:
		return badNode("it has no UID")
	case badAddress != nil:
		return badNode("its node port %q is not HOST:PORT", cleanText(n.Address, maxNodeID))
	case badGossip != nil:
		return badNode("its gossip address %q is not HOST:PORT", cleanText(n.Gossip, maxNodeID))
	case len(n.Address) > maxName || len(n.Gossip) > maxName || len(n.Advertise) > maxName ||
		len(n.Zone) > maxName || len(n.Version) > maxName ||
		len(n.Keyring) > maxName:
		return badNode("its addresses, zone, version or keyring are too long")
	case o.Slots < 0 || o.Slots > maxSlots || len(o.Devices) > maxDevices || len(o.Labels) > maxLabels:
		return badNode("it offers more than %d slots, %d devices or %d labels", maxSlots, maxDevices,
			maxLabels)
	case o.PortLo < 0 || o.PortHi < o.PortLo || o.PortHi > 65535:
		return badNode("its port range %d-%d is none", o.PortLo, o.PortHi)
	}
	return checkRoles(n.Roles)
}

func checkRoles(roles []state.Role) error {
	if len(roles) == 0 {
		return badNode("it has no role")
	}
	for i, r := range roles {
		known := r == state.RoleControl || r == state.RoleWorker || r == state.RoleIngress
		if !known || slices.Contains(roles[:i], r) {
			return badNode("role %q is unknown or given twice", cleanText(string(r), maxNodeID))
		}
	}
	return nil
}

func badNode(format string, args ...any) error {
	return problem.New(problem.InvalidArgument, "the node cannot be a member: "+format,
		args...).WithHint("look at its flags: dpserve join --help")
}
