package watch

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// This file reads protobuf itself: client-go reads a whole answer before it decodes the first object. The field numbers are from the .proto files of
// k8s.io/apimachinery/pkg/runtime (an answer is wrapped in Unknown) and of lists, the same for all kinds.
const (
	unknownRaw   = 2
	listMetadata = 1
	listItems    = 2
)

// magic begins each answer of the API server in protobuf.
var magic = []byte("k8s\x00")

// longest bounds a field in bytes, since each is read at once: many times what etcd stores of an object.
const longest = 32 << 20

var errNoList = errors.New("it is no list in protobuf")

// read takes one pod after the other from a list.
func read(body io.Reader) (*corev1.PodList, error) {
	list := &corev1.PodList{}
	err := readObjects(body, &list.ListMeta, func(text []byte) error {
		var pod corev1.Pod
		if err := pod.Unmarshal(text); err != nil {
			return fmt.Errorf("the pod after %d others: %w", len(list.Items), err)
		}
		Shorten(&pod)
		list.Items = append(list.Items, pod)
		return nil
	})
	if err != nil {
		return nil, err
	}
	return list, nil
}

// readObjects passes the objects of a list to item, one by one.
func readObjects(body io.Reader, about *metav1.ListMeta, item func(text []byte) error) error {
	in := bufio.NewReader(body)
	begin := make([]byte, len(magic))
	if _, err := io.ReadFull(in, begin); err != nil {
		return fmt.Errorf("reading the list: %w", err)
	}
	if !bytes.Equal(begin, magic) {
		return fmt.Errorf("reading the list: %w", errNoList)
	}
	found := false
	err := eachField(in, func(number int, size uint64) error {
		if number != unknownRaw {
			_, err := take(in, size)
			return err
		}
		raw := &io.LimitedReader{R: in, N: int64(min(size, 1<<62))}
		err := readList(raw, about, item)
		if err == nil && raw.N > 0 {
			err = io.ErrUnexpectedEOF
		}
		found = true
		return err
	})
	if err == nil && !found {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return fmt.Errorf("reading the list: %w", err)
	}
	return nil
}

func readList(raw *io.LimitedReader, about *metav1.ListMeta, item func(text []byte) error) error {
	in := bufio.NewReader(raw)
	return eachField(in, func(number int, size uint64) error {
		text, err := take(in, size)
		if err != nil {
			return err
		}
		switch number {
		case listMetadata:
			return about.Unmarshal(text)
		case listItems:
			return item(text)
		}
		return nil
	})
}

// eachField calls field for each field of a message, and field has to read it. All fields of the two messages are of the kind that has its size
// before it.
func eachField(in *bufio.Reader, field func(number int, size uint64) error) error {
	for {
		tag, err := binary.ReadUvarint(in)
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		case tag&7 != 2:
			return errNoList
		}
		size, err := binary.ReadUvarint(in)
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		if err != nil {
			return err
		}
		if err := field(int(min(tag>>3, 1<<30)), size); err != nil {
			return err
		}
	}
}

// take reads a field of that size.
func take(in io.Reader, size uint64) ([]byte, error) {
	if size > longest {
		return nil, fmt.Errorf("a field of it has %d bytes, more than %d", size, longest)
	}
	out := make([]byte, size)
	_, err := io.ReadFull(in, out)
	if errors.Is(err, io.EOF) && size > 0 {
		err = io.ErrUnexpectedEOF
	}
	return out, err
}
