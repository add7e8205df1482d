package membership

import (
	"encoding/binary"
	"errors"
	"slices"

	"github.com/hashicorp/memberlist"

	"github.com/dpserve/dpserve/internal/problem"
)

// Meta is what a node announces of itself: at most 512 bytes when encoded.
type Meta struct {
	Cluster string
	UID     string
	Address string // HOST:PORT of the node port
	Roles   []string
	Version string
	Zone    string
	Index   uint64 // of its copy of the state

	leaving bool // the node leaves on purpose
}

// metaFormat grows when old readers could no longer read the fields. Readers skip unknown fields.
const metaFormat = 1

// Fields: a tag (one byte), a length (one byte), the bytes.
const (
	tagCluster byte = iota + 1
	tagUID
	tagAddress
	tagRole // one field per role
	tagVersion
	tagZone
	tagIndex // little-endian, 8 bytes
	tagLeaving
)

// maxField is the longest field, maxRoles the highest number of roles that are read.
const (
	maxField = 255
	maxRoles = 16
)

var errMeta = errors.New("meta of a member cannot be read")

func (m Meta) encode() ([]byte, error) {
	b := []byte{metaFormat}
	fits := true
	field := func(tag byte, s string) {
		if s != "" {
			fits = fits && len(s) <= maxField
			b = append(append(b, tag, byte(len(s))), s...) //nolint:gosec // checked just above
		}
	}
	field(tagCluster, m.Cluster)
	field(tagUID, m.UID)
	field(tagAddress, m.Address)
	for _, r := range m.Roles {
		field(tagRole, r)
	}
	field(tagVersion, m.Version)
	field(tagZone, m.Zone)
	b = binary.LittleEndian.AppendUint64(append(b, tagIndex, 8), m.Index)
	if m.leaving {
		b = append(b, tagLeaving, 0)
	}
	// The field that Close adds must fit as well.
	if !fits || len(m.Roles) > maxRoles || len(b)+2 > memberlist.MetaMaxSize {
		return nil, problem.New(problem.InvalidArgument,
			"what this node tells of itself takes %d bytes, allowed are %d", len(b),
			memberlist.MetaMaxSize-2).
			WithHint("choose a shorter zone or advertised name")
	}
	return b, nil
}

// decodeMeta reads the result of encode. It ignores fields of newer versions.
func decodeMeta(b []byte) (Meta, error) {
	var m Meta
	if len(b) == 0 || len(b) > memberlist.MetaMaxSize || b[0] != metaFormat {
		return m, errMeta
	}
	for b = b[1:]; len(b) > 0; {
		if len(b) < 2 || len(b) < 2+int(b[1]) {
			return Meta{}, errMeta
		}
		if err := m.set(b[0], b[2:2+int(b[1])]); err != nil {
			return Meta{}, err
		}
		b = b[2+int(b[1]):]
	}
	if m.Cluster == "" || m.UID == "" {
		return Meta{}, errMeta
	}
	return m, nil
}

func (m *Meta) set(tag byte, value []byte) error {
	switch tag {
	case tagCluster:
		m.Cluster = string(value)
	case tagUID:
		m.UID = string(value)
	case tagAddress:
		m.Address = string(value)
	case tagRole:
		if len(m.Roles) == maxRoles {
			return errMeta
		}
		m.Roles = append(m.Roles, string(value))
	case tagVersion:
		m.Version = string(value)
	case tagZone:
		m.Zone = string(value)
	case tagIndex:
		if len(value) != 8 {
			return errMeta
		}
		m.Index = binary.LittleEndian.Uint64(value)
	case tagLeaving:
		m.leaving = true
	}
	return nil
}

// clone copies the caller's slice.
func (m Meta) clone() Meta {
	m.Roles = slices.Clone(m.Roles)
	return m
}
